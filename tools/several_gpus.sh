#!/bin/sh
# Measure tensor parallelism over N GPUs of one machine beside what was predicted: tools/several_gpus.sh N OUT [PART...]
#
# Each part ends after its time limit, and the next one starts:
#   sums    sums over ranks, beside NCCL and torch (150 s)
#   llama   throughput of Llama-3-70B's shape (240 s), then the simulation's errors (90 s)
#   vllm    the same workloads by quire and by vLLM (570 s), without vLLM if VLLM is not set
#   opt-c   Figure 12c: OPT-175B's shape, ShareGPT's lengths, vLLM's memory and three Orcas (570 s)
#   opt-f   Figure 12f: the same, Alpaca's lengths (570 s)
#
# Without PART: sums llama opt-c opt-f. OUT gets a JSON document for each part, and log.txt with each run as soon as it
# ends. The exit status is 1 if a run failed. Variables:
#   VLLM       the interpreter of vLLM's environment
#   LLAMA      a model config in place of llama3-70b
#   WORKLOADS  workloads of llama, such as "64:16@4"
#   SET        changes of the parameters of Figure 12, such as "model=opt-13b kv_tokens=15728"
#   PYTHON     the interpreter
set -u
fail() {
    echo "$1" >&2
    exit 2
}
[ $# -ge 2 ] || fail "usage: $0 N OUT [PART...]"
case $1 in *[!0-9]* | "" | 0 | 1) fail "$1 is no number of GPUs: give 2 or more" ;; esac
ranks=$1
[ -n "$2" ] && mkdir -p "$2" && [ -w "$2" ] || fail "nothing can be written to the folder '$2'"
out=$(cd "$2" && pwd)
shift 2
[ $# -gt 0 ] || set -- sums llama opt-c opt-f
for part; do
    case $part in sums | llama | vllm | opt-c | opt-f) ;; *) fail "there is no part $part" ;; esac
done
root=$(cd "$(dirname "$0")/.." && pwd)
failed=$out/.failed # a file that is made if a run fails: a variable of the pipeline below would be lost
rm -f "$failed"
python=${PYTHON:-python3} llama=${LLAMA:-llama3-70b} sets=
for change in "tp=$ranks" ${SET:-}; do sets="$sets --set $change"; done
workloads=
for name in ${WORKLOADS:-128:128@1 1000:128@1 1000:128@32 1024:128@512 128:1024@256}; do
    workloads="$workloads --workload fixed:$name"
done
# NVLink's multicast of one program can put the GPUs of others out of service.
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=1 VLLM_ALLREDUCE_USE_SYMM_MEM=0
export PYTHONUNBUFFERED=1 PYTHONPATH="$root/src:$root"

limited() { # SECONDS COMMAND...: run it in this checkout; what it prints goes to the log too
    seconds=$1
    shift
    echo "== $(date -u +%H:%M:%S) $*"
    (cd "$root" && timeout -k 15 "$seconds" "$@" 2>&1)
    status=$?
    [ $status = 0 ] || : > "$failed"
    echo "== exit status $status (124 or 137: it took longer than $seconds s)"
}

quire() { # SECONDS ARGUMENTS...
    seconds=$1
    shift
    limited "$seconds" "$python" -m quire "$@"
}

{
    nvidia-smi --query-gpu=name --format=csv,noheader 2>&1 || echo "no nvidia-smi"
    git -C "$root" describe --always --dirty --abbrev=12 2>&1
    for part; do
        case $part in
        sums) quire 150 bench parallel --ranks "$ranks" --part exchange --minutes 2.2 --out "$out/exchange.json" ;;
        llama)
            # shellcheck disable=SC2086
            quire 240 bench throughput --model-config "$llama" --dummy-weights --tp "$ranks" --max-model-len 2048 \
                --no-enable-prefix-caching --warmup 0 --repeat 1 $workloads --out "$out/llama.json"
            [ "$llama" != llama3-70b ] || quire 90 reproduce llama-70b-tp --set "ranks=[$ranks]" \
                --set "measured=$out/llama.json" --no-pictures --out "$out"
            ;;
        vllm)
            # shellcheck disable=SC2086,SC2046
            limited 570 "$python" tools/compare_gpu.py "$llama" --tp "$ranks" --vllm "${VLLM:-}" --seeds 13 \
                --workloads $(echo "$workloads" | sed 's/--workload//g') --out "$out/beside_vllm.json"
            ;;
        # shellcheck disable=SC2086
        opt-c | opt-f) quire 570 reproduce "fig12${part#opt-}-gpu" $sets --no-pictures --out "$out" ;;
        esac
    done
} | tee -a "$out/log.txt"
[ ! -e "$failed" ] || { rm "$failed"; exit 1; }

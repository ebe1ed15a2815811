"""quire's greedy tokens beside llama.cpp's, of GGUF files that llama.cpp's tools wrote, on a CPU.

    python tools/compare_tokens.py FOLDER --formats f32 bf16 q8_0 --out tokens.json
    python tools/compare_tokens.py FOLDER --model smollm2 --formats q4_1 --out tokens.json

Random prompts of tokens, or, for SmolLM2, questions in its chat's form. Each file is compared with what llama.cpp says
of it (KV in F32, no flash attention), and with what it says of the same numbers written as F32, where it rounds no
activations. Besides, llama.cpp is compared with itself: with its defaults (KV in F16, flash attention), and across the
two files. FOLDER is that of tools/compare_cpu.py.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / "src"), str(HERE)]

import compare_models  # noqa: E402

from quire.bench.document import short, table  # noqa: E402

FORMATS = ("f32", "bf16", "q8_0", "q4_0", "q4_1", "q4_k", "q6_k")
DTYPES = ("float32", "bfloat16")
CHAT = (
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
)
OWN, PLAIN = "the file", "its numbers in F32"

Said = list[dict[str, Any]]
"""Of each prompt its ids, the likeliest tokens and their margins."""


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0], allow_abbrev=False)
    parser.add_argument("folder", type=Path, help="where llama.cpp and models are, or are made")
    parser.add_argument("--model", choices=["125m", "500m", "smollm2"], default="125m")
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=["f32", "bf16"])
    parser.add_argument("--prompts", type=int, metavar="N", help="default 200, or all 50 questions")
    parser.add_argument("--tokens", type=int, metavar="N", help="of each answer at most (default 12, or 48)")
    parser.add_argument("--threads", type=int, default=1, metavar="N")
    parser.add_argument("--brief", action="store_true", help="quire alone beside llama.cpp, on the file alone")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the results as JSON")
    return parser


def prompts_of(args: argparse.Namespace) -> list[str] | list[list[int]]:
    """Questions as SmolLM2's template puts them, or 4 to 59 random tokens each."""
    if args.model == compare_models.SMOLLM2:
        questions = (HERE / "compare_questions.txt").read_text().splitlines()
        return [CHAT.format(question) for question in questions[: args.prompts]]
    draw = random.Random(5)
    return [[draw.randrange(3, 32000) for _ in range(draw.randrange(4, 60))] for _ in range(args.prompts or 200)]


def llama(args: argparse.Namespace, path: Path, prompts: Sequence[Any], behind: Said | None = None,
          defaults: bool = False) -> Said:  # fmt: skip
    """llama.cpp's greedy tokens; `behind`: its likeliest ones behind those."""
    given = None if behind is None else [one["tokens"] for one in behind]
    job = {"model": str(path), "prompts": prompts, "count": args.tokens, "behind": given, "threads": args.threads,
           "defaults": defaults}  # fmt: skip
    found: Said = compare_models.run_job(compare_models.environment(args.folder, "llama"), "llama_tokens.py", job)
    return found


def written(args: argparse.Namespace, path: Path, kind: str) -> Path:
    """A file's numbers in another format, written by llama.cpp."""
    made = Path(args.folder, f"{path.stem}-as-{kind}.gguf")
    if not made.exists():
        part = made.with_suffix(".part")
        compare_models.gguf_tool(args.folder, "quantize", path, part, kind)
        part.rename(made)
    return made


def file_of(args: argparse.Namespace, kind: str) -> Path:
    """The model in this format. SmolLM2 is what was published, in Q4_1, or made of that."""
    if args.model == compare_models.SMOLLM2:
        path = compare_models.published(args.folder)
        return path if kind == "q4_1" else written(args, path, kind)
    if kind == "f32":
        return written(args, compare_models.gguf(args.folder, args.model, "bf16"), kind)
    return compare_models.gguf(args.folder, args.model, kind)


def agreement(reference: Said, greedy: Sequence[Sequence[int]], same: Sequence[Sequence[bool]]) -> dict[str, Any]:
    """How far `greedy` tokens are the reference's, where they end first or go on longer aside; `same`: behind the
    reference's own tokens, whether each next one is the likeliest. `margins`: the reference's, where answers part."""
    margins = []
    for one, tokens in zip(reference, greedy, strict=True):
        parted = [at for at, token in enumerate(one["tokens"]) if tokens[at : at + 1] != [token]]
        if parted:
            margins.append(one["margins"][parted[0]])
    total = sum(map(len, same))
    return {
        "prompts": len(reference), "whole": len(reference) - len(margins), "tokens": total,
        "behind": sum(map(sum, same)), "margins": sorted(margins),
    }  # fmt: skip


def beside_itself(reference: Said, found: Said) -> dict[str, Any]:
    """llama.cpp with other settings, whose tokens stand behind the reference's."""
    same = [[x == y for x, y in zip(one["tokens"], other["tokens"])] for one, other in zip(reference, found)]
    return agreement(reference, [other["tokens"] for other in found], same)


class Quire:
    """quire.LLM over a file."""

    def __init__(self, args: argparse.Namespace, path: Path, dtype: str) -> None:
        from quire import LLM

        self.count = args.tokens
        self.llm = LLM(str(path), dtype=dtype, threads=args.threads, kv_gib=1, max_num_seqs=16, max_model_len=1024,
                       skip_tokenizer_init=args.model != compare_models.SMOLLM2)  # fmt: skip

    def beside(self, reference: Said, prompts: Sequence[Any]) -> dict[str, Any]:
        """Its agreement with the reference, whose ids must be those of its own tokenizer."""
        from quire import SamplingParams

        ids = [one["ids"] for one in reference]
        if (words := self.llm.tokenizer) is not None:
            assert ids == [words.encode(prompt) for prompt in prompts], "tokenizers differ"
        params = SamplingParams(temperature=0, max_tokens=self.count, ignore_eos=True, detokenize=False)
        greedy = [list(one.outputs[0].token_ids) for one in self.llm.generate(ids, params, use_tqdm=False)]
        whole = [one["ids"] + one["tokens"] for one in reference]
        params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, detokenize=False)
        same = []
        for one, scored in zip(reference, self.llm.generate(whole, params, use_tqdm=False)):
            tops = (scored.prompt_logprobs or [])[len(one["ids"]) :]
            same.append([top is not None and top[token].rank == 1
                         for top, token in zip(tops, one["tokens"], strict=True)])  # fmt: skip
        return agreement(reference, greedy, same)


def compare(args: argparse.Namespace, kind: str, add: Callable[[dict[str, Any]], None]) -> None:
    """All of one format."""
    path, prompts = file_of(args, kind), prompts_of(args)

    def note(of: str, engine: str, found: dict[str, Any]) -> None:
        add({"format": kind, "llama": of, "beside": engine, **found})

    own = llama(args, path, prompts)
    references = {OWN: own}
    if not args.brief:
        note(OWN, "llama.cpp, its defaults", beside_itself(own, llama(args, path, prompts, own, defaults=True)))
    if not args.brief and kind != "f32":
        references[PLAIN] = exact = llama(args, written(args, path, "f32"), prompts)
        note(PLAIN, f"llama.cpp, {OWN}", beside_itself(exact, llama(args, path, prompts, exact)))
    for dtype in DTYPES:
        engine = Quire(args, path, dtype)
        for of, reference in references.items():
            note(of, f"quire, {dtype}", engine.beside(reference, prompts))
        engine.llm.close()


def show(results: Sequence[dict[str, Any]]) -> str:
    rows = [
        (one["format"], one["llama"], one["beside"], f"{one['whole']} of {one['prompts']}",
         f"{100 * one['behind'] / one['tokens']:.1f}", short(max(one["margins"], default=None)))
        for one in results
    ]  # fmt: skip
    return table(("format", "llama.cpp, of", "beside", "whole", "behind, %", "largest margin"), rows)


def main(given: list[str]) -> int:
    args = arguments().parse_args(given)
    asked = args.model == compare_models.SMOLLM2
    args.folder, args.tokens = args.folder.resolve(), args.tokens or (48 if asked else 12)
    args.folder.mkdir(parents=True, exist_ok=True)
    results: list[dict[str, Any]] = []

    def add(found: dict[str, Any]) -> None:
        results.append(found)
        print(show([found]).splitlines()[1], file=sys.stderr, flush=True)
        compare_models.keep(args, "compare_tokens", given, results, model=args.model)

    for kind in args.formats:
        compare(args, kind, add)
    print(show(results))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

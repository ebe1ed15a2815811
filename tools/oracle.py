"""Compare two revisions of quire: drive both with the same seeded loads, then compare answers and plan logs.

    python tools/oracle.py check --baseline REV          # this working tree against a revision
    python tools/oracle.py record --python PYTHON --src DIR --out DIR
    python tools/oracle.py compare DIR_A DIR_B           # exit status 1 if anything differs

The loads are data in oracle_loads.py. Each runs in a process of its own and through public interfaces only: what
`import quire` exports, the command line and the HTTP routes. A load fails if what it is named after did not occur. Plan
logs are compared by `quire replay` of the working tree, and byte by byte without the durations of steps.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import http.client
import itertools
import json
import os
import re
import runpy
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import asdict, is_dataclass
from io import StringIO
from pathlib import Path
from typing import Any

import oracle_loads
from oracle_loads import CLI, LOADS, OPEN, SERVE, Load, Serve

ROOT = Path(__file__).resolve().parent.parent
CACHE = ROOT / ".oracle"
START_SECONDS, LOAD_SECONDS = 120, 300
MOST_SHOWN = 3  # requests of a load, and as many plan logs at least
DIGITS = 6  # of a float after the point: log-probabilities are printed so
TIMED = {"created", "created_at", "completed_at", "arrival_time"}
RANDOM_ID = re.compile(r"\b((?:[a-z]+[-_])*)(?<![0-9a-f])[0-9a-f]{24,32}\b")
ADDRESS = re.compile(r"quire serves .* at http://127\.0\.0\.1:(\d+)")
NOISY_METRIC = re.compile(r"seconds|_bucket|_sum|_count|cpu|_created|memory|process_|python_|=/metrics")
STREAMED = {"text", "content", "delta", "arguments", "partial_json", "thinking", "reasoning", "reasoning_content"}
MAGIC, FRAME, RESULT = b"quire plans 1\n", struct.Struct("<I"), 2
DURATIONS = slice(7, 23)  # bytes of a result's frame


# Recording


def record(python: str, src: Path | None, out: Path, only: list[str], jobs: int) -> list[str]:
    """Run the loads under an interpreter, with `src` before its own packages. Returns the loads that failed."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "COLUMNS": "100"}
    env |= {"PYTHONPATH": str(src)} if src else {}
    env.pop("QUIRE_API_KEY", None), env.pop("QUIRE_ADMIN_KEY", None)
    models = CACHE / f"models-{_digest(Path(oracle_loads.__file__))}"
    if not models.exists():
        subprocess.run([python, __file__, "models", str(models)], check=True, env=env)
    out.mkdir(parents=True, exist_ok=True)

    def one(load: Load) -> str | None:
        with tempfile.TemporaryDirectory() as place:  # an empty current directory
            command = [python, __file__, "run", load.name, "--out", str(out.absolute()), "--models", str(models)]
            done = subprocess.run(
                command, env=env, cwd=place, capture_output=True, text=True, timeout=LOAD_SECONDS, check=False
            )
        if done.returncode == 0:
            return None
        print(f"{load.name} failed:\n{done.stdout[-300:]}{done.stderr[-4000:]}", file=sys.stderr)
        return load.name

    chosen = [load for load in LOADS if not only or load.name in only]
    for load in chosen:
        for old in out.glob(f"{load.name}.*"):
            old.unlink()
    with ThreadPoolExecutor(jobs) as threads:
        return [name for name in threads.map(one, sorted(chosen, key=lambda load: not load.slow)) if name]


def run(load: Load, out: Path, models: Path) -> None:
    """Run one load in this process and write what came of it."""
    began, answers, words, tokens = time.monotonic(), list[Any](), list[Any](), 0
    engines: list[Any] = list(load.engines) or [{}]
    for number, settings in enumerate(engines):
        log = out / f"{load.name}.{number}.plans"
        runner = _serve if isinstance(load.calls, Serve) else _command if load.calls is CLI else _offline
        print(f"with {json.dumps(settings)}", flush=True)
        found, facts = runner(load, settings, log, models, words)
        prefix = f"{json.dumps(settings)} " if len(engines) > 1 else ""
        answers += [(f"{prefix}{name}", clean(answer)) for name, answer in found]
        tokens += int(facts.get("generated", 0))
        for names, least in load.expect.items():
            most = max((facts.get(name, 0) for name in names.split("|")), default=0)
            if most < least:
                raise SystemExit(f"{prefix}{names} is {most}, not {least} or more, of {facts}")
        if not load.plans:
            log.unlink(missing_ok=True)
    written = {"answers": answers, "words": words, "tokens": tokens, "seconds": round(time.monotonic() - began, 1)}
    (out / f"{load.name}.json").write_text(json.dumps(written, indent=1, sort_keys=True))


def _offline(load: Load, settings: dict[str, Any], log: Path, models: Path, words: list[Any]) -> tuple[Any, Any]:
    """Make an LLM, or of settings with a `pool` one for each of its members, and call it."""
    import quire

    base = {"dtype": "float32", "device": "cpu", "threads": 1, "seed": 7, "max_num_seqs": 16, "kv_tokens": 4096}
    members = [{**base, **own} for own in settings.get("pool", [settings])]
    for number, own in enumerate(members):
        own["log_plans"] = str(log.with_suffix(f".{number}.plans") if number else log)
        if (models / own.get("model", "-")).exists():
            own["model"] = str(models / own["model"])
    answers, results = [], list[Any]()
    try:
        with ExitStack() as stack:
            if "pool" in settings:
                pool = quire.Pool([quire.EngineConfig(**own) for own in members], kv_gib=settings["kv_gib"])
                made = [quire.LLM(own["model"], custom_kv_cache=pool) for own in members]
            else:
                made = [quire.LLM(members[0].pop("model", None), **members[0])]
            for llm in made:
                stack.enter_context(llm)
            for number, (method, *arguments) in enumerate(load.calls):
                for llm in made:
                    answers.append((f"{number} {method}", _called(quire, llm, method, arguments, results, load.errors)))
    except Exception as error:
        if not load.errors:
            raise
        answers.append(("start", {"error": type(error).__name__, "message": str(error)}))
    facts = _facts(log) if log.exists() else {}
    outputs = [output for result in results for output in result.outputs]
    facts["generated"] = sum(len(output.token_ids) for output in outputs)
    facts["cached"] = sum(result.num_cached_tokens for result in results)
    needed = sum(len(result.prompt_token_ids) - 1 - result.num_cached_tokens for result in results)
    facts["recomputed"] = facts.get("tokens", 0) - needed - facts["generated"]  # if all have one output
    facts["admitted again"] = facts.get("admitted", 0) - len(results)
    return answers, facts


def _called(quire: Any, llm: Any, method: str, arguments: list[Any], results: list[Any], errors: bool) -> Any:
    """The answer of one call: [method, prompts, parameters] or [method, arguments...]; with `errors` also its error."""
    params = {"generate": quire.SamplingParams, "chat": quire.SamplingParams, "stream": quire.SamplingParams,
              "beam_search": quire.BeamSearchParams}.get(method)  # fmt: skip
    try:
        if params is None:
            return oracle_loads.SESSION(llm, *arguments) if method == "session" else getattr(llm, method)(*arguments)
        prompts, asked, *more = arguments
        made = [params(**each) for each in asked] if isinstance(asked, list) else params(**asked)
        if method == "stream":
            return [(output.branch, output.text, output.tokens, output.done) for output in llm.stream(prompts, made)]
        answer = getattr(llm, method)(prompts, made, use_tqdm=False, **(more[0] if more else {}))
        results += answer if method != "beam_search" else []
        return answer
    except Exception as error:
        if not errors:
            raise
        return {"error": type(error).__name__, "message": str(error), "param": getattr(error, "param", None)}


def _facts(log: Path) -> dict[str, int]:
    """Return the numbers that `quire replay` prints, keyed by the word next to each."""
    text = _quire("replay", str(log))[1]
    found = dict(re.findall(r"\b([A-Z]\w+) (\d[\d,]*)", text))
    found |= {name: number for number, name in re.findall(r"(\d[\d,]*) ([a-z]\w*)", text)}
    facts = {name: int(number.replace(",", "")) for name, number in found.items()}
    made, inherited = re.findall(oracle_loads.NEW_SLOTS, text)[0]
    facts["admitted"] = int(made.replace(",", "")) - int(inherited.replace(",", ""))
    return {**facts, "steps": sum(frame[1] != RESULT for frame in frames(log)[1])}


def _quire(*arguments: str) -> tuple[int, str]:
    """`quire ARGUMENTS` in this process: the exit status, and what was printed."""
    said, before = StringIO(), sys.argv
    sys.argv = ["quire", *arguments]
    try:
        with redirect_stdout(said), redirect_stderr(said):
            runpy.run_module("quire", run_name="__main__")
    except SystemExit as end:
        return (0 if end.code is None else int(end.code)), said.getvalue()
    finally:
        sys.argv = before
    return 0, said.getvalue()


def _command(load: Load, settings: dict[str, Any], log: Path, models: Path, words: list[Any]) -> tuple[Any, Any]:
    """Run one command line. Its exit status is compared, what it printed and which files it wrote."""
    for name, text in settings.get("files", {}).items():
        Path(name).write_text(text)
    command = [*settings["quire"], *(("--log-plans", str(log)) if settings.get("log") else ())]
    if "stdin" in settings:
        done = subprocess.run([sys.executable, "-m", "quire", *command], input=settings["stdin"], capture_output=True,
                              text=True, check=False, timeout=LOAD_SECONDS)  # fmt: skip
        status, said = done.returncode, done.stdout
    else:
        status, said = _quire(*command)
    answer: dict[str, Any] = {"status": status}
    if (pattern := settings.get("keeps")) is not None:  # the rest is compared with --words
        words.append((" ".join(command), said))
    answer["stdout"] = said if pattern is None else re.findall(pattern, said, re.MULTILINE)
    for name in settings.get("reads", ()):
        answer[name] = [json.loads(line) for line in Path(name).read_text().splitlines()]
        answer[name].sort(key=lambda line: str(line.get("custom_id", "")))
    for name in settings.get("results", ()):
        answer[name] = json.loads(Path(name).read_text())["results"]
    return [("command", answer)], {"status": status, "characters": len(said)}


# HTTP


def _serve(load: Load, settings: dict[str, Any], log: Path, models: Path, words: list[Any]) -> tuple[Any, Any]:
    """Start `quire serve`, send the requests one after another, and stop it."""
    flags = [part for name, value in settings.items() for part in _flag(name, value, models)]
    answers = list[tuple[str, Any]]()
    with _server(flags, log) as port:
        last = ""
        for number, (method, path, body, *more) in enumerate(load.calls.requests):
            if method == "AT ONCE":
                answers.append((f"{number} {method} {path}", _at_once(port, path, body)))
                continue
            named = json.loads(json.dumps(body).replace("$LAST", last)) if isinstance(body, dict) else body
            answer, raw = _asked(port, method, path.replace("$LAST", last), named, more[0] if more else {})
            last = raw or last
            answers.append((f"{number} {method} {path} {_short(body) if body else ''}", answer))
        facts, names = _counters(port)
        openapi = json.loads(_exchange(port, "GET", "/openapi.json", None, OPEN)[2])
        answers += [("metrics", names), ("routes", _routes(openapi))]
        if load.plans:
            answers.append(("counters", dict(facts)))
    words.append(("openapi", openapi))
    facts["generated"] = facts.get("quire_generation_tokens_total", 0)
    return answers, facts


def _flag(name: str, value: Any, models: Path) -> list[str]:
    """A flag of the command line; `model` is the positional argument."""
    if name == "model":
        return [str(models / value) if (models / value).exists() else value]
    if name == "files":
        for file, text in value.items():
            Path(file).write_text(text)
        return []
    return ["--" + name.replace("_", "-")] + ([] if value is True else [str(value)])


@contextmanager
def _server(flags: list[str], log: Path) -> Iterator[int]:
    """The port of a server that is ready; it ends by SIGTERM, so that its plan log is whole."""
    command = [sys.executable, "-m", "quire", "serve", *flags, *SERVE, "--log-plans", str(log)]
    said = Path("server.log")
    with said.open("wb") as file:
        server = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        end = time.monotonic() + START_SECONDS
        while not (found := ADDRESS.search(said.read_text())):
            if server.poll() is not None or time.monotonic() > end:
                raise SystemExit(f"quire serve {flags} did not start:\n{said.read_text()[-3000:]}")
            time.sleep(0.05)
        yield int(found[1])
        server.terminate()
        if server.wait(60) != 0:
            raise SystemExit(f"quire serve {flags} ended with status {server.returncode}:\n{said.read_text()[-3000:]}")
    finally:
        with suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)


def _exchange(port: int, method: str, path: str, body: Any, headers: dict[str, str]) -> tuple[int, Any, bytes]:
    """One request over a connection of its own."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=LOAD_SECONDS)
    data = body.encode() if isinstance(body, str) else body if isinstance(body, bytes | None) else json.dumps(body)
    connection.request(method, path, data, {"Content-Type": "application/json", **headers})
    answer = connection.getresponse()
    try:
        return answer.status, answer.headers, answer.read()
    finally:
        connection.close()


def _asked(port: int, method: str, path: str, body: Any, headers: dict[str, str]) -> tuple[dict[str, Any], str]:
    """The answer, with the parts of a stream joined, and its id."""
    status, got, data = _exchange(port, method, path, body, {**OPEN, **headers})
    answer: dict[str, Any] = {"status": status, "type": got.get("Content-Type"), "warning": got.get_all("Warning")}
    if (got.get("Content-Type") or "").startswith("text/event-stream"):
        answer["events"] = joined(data.decode())
        return answer, ""
    if (got.get("Content-Type") or "").startswith("text/html"):
        return answer, ""  # the words of a page may change
    try:
        answer["body"] = json.loads(data) if data else ""
    except ValueError:
        answer["body"] = data.decode("utf-8", "replace") if len(data) < 5000 else hashlib.sha256(data).hexdigest()
    found = answer["body"]
    return answer, found["id"] if isinstance(found, dict) and isinstance(found.get("id"), str) else ""


def _at_once(port: int, path: str, bodies: list[Any]) -> list[Any]:
    with ThreadPoolExecutor(len(bodies)) as threads:
        return [answer for answer, _ in threads.map(lambda body: _asked(port, "POST", path, body, {}), bodies)]


def joined(text: str) -> list[Any]:
    """The events of a stream; those of one kind and place are one, whose texts are joined: where a text was cut depends
    on timing."""
    places: dict[str, Any] = {}
    for data in re.findall(r"^data: (.*)$", text, re.MULTILINE):
        if data == "[DONE]":
            places[data] = data
            continue
        event = json.loads(data)
        event.pop("sequence_number", None)
        choices = event.get("choices") or [{}]
        where = [event.get("type"), event.get("output_index"), event.get("content_index"), event.get("index"),
                 choices[0].get("index")]  # fmt: skip
        place = json.dumps(where)
        places[place] = _merged(places[place], event, "") if place in places else event
    return list(places.values())


def _merged(one: Any, other: Any, name: str) -> Any:
    if isinstance(one, dict) and isinstance(other, dict):
        return {key: _merged(one.get(key), other.get(key), key) for key in {**one, **other}}
    if one is None or other is None:
        return other if one is None else one
    if isinstance(one, str) and name in STREAMED:
        return one + other
    if name == "tool_calls":
        calls = {call["index"]: call for call in one}
        calls |= {call["index"]: _merged(calls.get(call["index"]), call, "") for call in other}
        return list(calls.values())
    if isinstance(one, list) and name == "choices":
        return [_merged(a, b, "") for a, b in itertools.zip_longest(one, other)]
    return one + other if isinstance(one, list) else other


def _counters(port: int) -> tuple[dict[str, float], list[str]]:
    """Counters of /metrics that no clock moves, once they have settled (the engine reports to the server now and then),
    and the names of all metrics with those of their labels."""
    before: dict[str, float] = {"": 0.0}
    while True:
        facts, names = {}, set()
        text = _exchange(port, "GET", "/metrics", None, OPEN)[2].decode()
        for name, labels, value in re.findall(r"^(\w[\w:]*)(?:\{(.*)\})? (\S+)$", text, re.MULTILINE):
            pairs = sorted(re.findall(r'(\w+)="([^"]*)"', labels))
            names.add(f"{name}{[key for key, _ in pairs]}")
            said = "".join(f"{{{key}={word}}}" for key, word in pairs if key not in ("model_name", "engine"))
            if name.endswith("_total") and not NOISY_METRIC.search(name + said):
                facts[name + said] = float(value)
        if facts == before:
            return facts, sorted(names)
        before = facts
        time.sleep(0.6)


def _routes(openapi: dict[str, Any]) -> list[str]:
    """Every route, the statuses that it may answer, and the fields of its body."""
    schemas = openapi.get("components", {}).get("schemas", {})
    found = []
    for path, methods in openapi["paths"].items():
        for method, route in methods.items():
            content = route.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema", {})
            schema = schemas.get(content.get("$ref", "").rpartition("/")[2], content)
            query = sorted(parameter["name"] for parameter in route.get("parameters", []))
            found.append(f"{method} {path} {sorted(route['responses'])} {query} {sorted(schema.get('properties', {}))}")
    return sorted(found)


# What is compared


def clean(value: Any) -> Any:
    """Return plain JSON without what differs between runs: times, random ids and digits beyond DIGITS."""
    if isinstance(value, float):
        return round(value, DIGITS)
    if isinstance(value, str):
        return RANDOM_ID.sub(r"\1#", value)
    if is_dataclass(value) and not isinstance(value, type):
        value = asdict(value)
        value.pop("metrics", None), value.pop("request_id", None)
    if hasattr(value, "_asdict"):
        value = value._asdict()
    if isinstance(value, dict):
        return {str(key): clean(item) for key, item in value.items() if key not in TIMED}
    return [clean(item) for item in value] if isinstance(value, list | tuple) else value


def compare(a: Path, b: Path, python: str, src: Path, only: list[str], words: bool, messages: bool) -> bool:
    """Print a table of the loads and what differs in each. True if all are equal."""
    logs = sorted({path.name for folder in (a, b) for path in folder.glob("*.plans")})
    env = {**os.environ, "PYTHONPATH": str(src)}
    command = [python, __file__, "replay", str(a), str(b), *logs]
    said = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    if said.returncode:
        raise SystemExit(f"the plan logs could not be replayed: {said.stderr[-3000:]}")
    replayed = json.loads(said.stdout)
    names = sorted({path.stem for folder in (a, b) for path in folder.glob("*.json")} & {load.name for load in LOADS})
    if not names:
        raise SystemExit(f"{a} and {b} have no load in common")
    notes = list[str]()
    print(f"{'load':<22}{'requests':>9}{'tokens':>9}{'plan steps':>11}  equal?")
    for name in [name for name in names if not only or name in only]:
        one, other = (_read(folder / f"{name}.json") for folder in (a, b))
        mine = [log for log in logs if log.split(".")[0] == name]
        if one["answers"] and other["answers"]:
            found = [*_differences(one, other, words, messages)][:MOST_SHOWN]
            found += [f"plan log {log}: {what}" for log in mine for what in (*replayed[log], *_bytes(a / log, b / log))]
        else:
            found = [f"{b if one['answers'] else a} has no record of it"]
        steps = sum(sum(frame[1] != RESULT for frame in frames(a / log)[1]) for log in mine if (a / log).exists())
        print(f"{name:<22}{len(one['answers']):>9,}{one['tokens']:>9,}{steps:>11,}  {'no' if found else 'yes'}")
        notes += [f"\n{name}:", *(f"  {line}" for line in found[: 2 * MOST_SHOWN])] if found else []
    print("\n".join(notes) if notes else "all equal")
    return not notes


def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.exists() else {"answers": [], "words": [], "tokens": 0}


def _differences(one: dict[str, Any], other: dict[str, Any], words: bool, messages: bool) -> Iterator[str]:
    """The first difference of each request."""
    for kind in ("answers", "words") if words else ("answers",):
        if len(one[kind]) != len(other[kind]):
            yield f"{len(one[kind])} {kind} and {len(other[kind])}"
        for (name, mine), (_, theirs) in zip(one[kind], other[kind]):
            if (found := difference(mine, theirs, "", messages)) is not None:
                yield f"request {name}: {found}"


def difference(one: Any, other: Any, place: str, messages: bool) -> str | None:
    """The first place at which two values differ, and both values there. Without `messages`, texts of errors may."""
    if isinstance(one, dict) and isinstance(other, dict):
        for key in {**one, **other}:
            if key == "message" and not messages and isinstance(one.get(key), str):
                continue
            if key not in one or key not in other:
                return f"only {'the first' if key in one else 'the second'} has {place}.{key}"
            if (found := difference(one[key], other[key], f"{place}.{key}", messages)) is not None:
                return found
        return None
    if isinstance(one, list) and isinstance(other, list):
        for i, (mine, theirs) in enumerate(zip(one, other)):
            if (found := difference(mine, theirs, f"{place}[{i}]", messages)) is not None:
                return found
        return None if len(one) == len(other) else f"{place} has {len(one)} and {len(other)} entries"
    return None if one == other else f"{place} is {_short(one)} and {_short(other)}"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 120 else text[:117] + "..."


def frames(log: Path) -> tuple[bytes, list[bytes]]:
    """The header of a plan log, and its frames, without how long steps took; docs/plan-log.md has the format. Of a log
    of another version nothing is read."""
    data = log.read_bytes()
    if not data.startswith(MAGIC):
        return b"", []
    found, at = list[bytes](), len(MAGIC)
    while at < len(data):
        start = at + FRAME.size
        at = start + FRAME.unpack_from(data, at)[0]
        frame = bytearray(data[start:at])
        if found and frame[1] == RESULT:
            frame[DURATIONS] = bytes(16)
        found.append(bytes(frame))
    return found[0], found[1:]


def _bytes(a: Path, b: Path) -> Iterator[str]:
    """The first frame that differs, where both logs have the same format."""
    if not (a.exists() and b.exists()):
        return
    (header, one), (other_header, other) = frames(a), frames(b)
    if not header or not other_header or not one or not other or one[0][0] != other[0][0]:
        return
    if json.loads(header) != json.loads(other_header):
        yield "the headers differ"
    for i, (mine, theirs) in enumerate(zip(one, other)):
        if mine != theirs:
            yield f"frame {i} ({'a result' if mine[1] == RESULT else 'a plan'}) differs in bytes"
            return
    if len(one) != len(other):
        yield f"{len(one)} frames and {len(other)}"


def _number_image_keys(log: Path) -> None:
    """Replace the keys of images in a plan log by numbers in the order in which they appear. The keys are digests that
    another revision may compute over other settings: only which of them are equal is compared."""
    from quire.protocol.images import ImageItem, ImagePixels
    from quire.protocol.plan_log import PlanLog

    keys = dict[bytes, None]()

    def collect(value: object) -> None:
        if isinstance(value, (ImageItem, ImagePixels)):
            keys.setdefault(value.key)
        elif isinstance(value, tuple):
            for item in value:
                collect(item)

    with PlanLog(log) as steps:
        for step in steps:
            collect(step)
    data = log.read_bytes()
    for number, key in enumerate(keys):
        data = data.replace(key, number.to_bytes(len(key)))
    if keys:
        log.write_bytes(data)


def replay(a: Path, b: Path, logs: list[str]) -> dict[str, list[str]]:
    """What `quire replay` of this interpreter says against each pair of logs. Both are replayed, the older too."""
    found = {}
    for log in logs:
        pair = [str(a / log), str(b / log)]
        if missing := [path for path in pair if not Path(path).exists()]:
            found[log] = [f"there is no {missing[0]}"]
            continue
        for path in pair:
            _number_image_keys(Path(path))
        runs = [_quire("replay", pair[0]), _quire("replay", pair[1]), _quire("replay", pair[0], "--against", pair[1])]
        found[log] = [f"quire replay: {text.strip()[-400:]}" for status, text in runs if status != 0]
    return found


# Checking the working tree


def check(baseline: str, only: list[str], jobs: int, words: bool, messages: bool) -> bool:
    """Record a revision, once, and the working tree, and compare them. Another check at the same time waits."""
    CACHE.mkdir(exist_ok=True)
    lock = (CACHE / "lock").open("w")
    fcntl.flock(lock, fcntl.LOCK_EX)
    git = ["git", "-C", str(ROOT)]
    revision = subprocess.run([*git, "rev-parse", f"{baseline}^{{commit}}"], check=True, capture_output=True, text=True)
    name = revision.stdout.strip()[:12]
    tree, there = CACHE / "trees" / name, CACHE / f"{name}-{_digest(Path(__file__), Path(oracle_loads.__file__))}"
    if not tree.exists():
        subprocess.run([*git, "worktree", "prune"], check=True)
        subprocess.run([*git, "worktree", "add", "--quiet", "--detach", str(tree), name], check=True)
    failed = list[str]()
    missing = [load.name for load in LOADS if not (there / f"{load.name}.json").exists()]
    missing = [load for load in missing if not only or load in only]
    if missing:
        _build(tree)
        failed += record(sys.executable, tree / "src", there, missing, jobs)
    _build(ROOT)
    here = CACHE / "tree"
    failed += record(sys.executable, ROOT / "src", here, only, jobs)
    good = compare(there, here, sys.executable, ROOT / "src", only, words, messages)
    print(f"failed: {', '.join(failed)}" if failed else "")
    return good and not failed


def _build(tree: Path) -> None:
    """Build the CPU kernels of a tree; those of another one with the same sources are taken over."""
    [script] = (tree / "src").glob("**/kernels/cpu/build.py")
    if tree != ROOT and not (script.parent / "built").exists():
        for built in (ROOT / "src").glob("**/kernels/cpu/built"):
            shutil.copytree(built, script.parent / "built")
    subprocess.run([sys.executable, str(script)], check=True, stdout=subprocess.DEVNULL)


def _digest(*files: Path) -> str:
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:8]


def main() -> int:
    """Run a command of the oracle; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    made = {name: commands.add_parser(name, help=about) for name, about in (
        ("check", "compare this working tree with a revision"), ("record", "run the loads and write what came of them"),
        ("compare", "compare two recordings"), ("list", "print the loads"), ("run", "run one load (record calls it)"),
        ("models", "make the models of the loads"), ("replay", "replay pairs of plan logs (compare calls it)"),
    )}  # fmt: skip
    made["check"].add_argument("--baseline", required=True, metavar="REV")
    made["record"].add_argument("--python", default=sys.executable)
    for name in ("record", "compare"):
        made[name].add_argument("--src", type=Path, default=ROOT / "src" if name == "compare" else None, metavar="DIR")
    for name in ("check", "record", "compare"):
        made[name].add_argument("--only", nargs="+", default=[], metavar="NAME", help="only these loads")
    for name in ("check", "record"):
        made[name].add_argument("--jobs", type=int, default=2, metavar="N", help="loads at a time (default: 2)")
    for name in ("check", "compare"):
        made[name].add_argument("--words", action="store_true", help="compare help texts and descriptions too")
        made[name].add_argument("--no-messages", dest="messages", action="store_false", help="not the texts of errors")
    for name in ("compare", "replay"):
        made[name].add_argument("one", type=Path, metavar="DIR")
        made[name].add_argument("other", type=Path, metavar="DIR")
    made["replay"].add_argument("logs", nargs="*")
    made["run"].add_argument("name")
    for name in ("record", "run"):
        made[name].add_argument("--out", type=Path, required=True, metavar="DIR")
    made["run"].add_argument("--models", type=Path)
    made["models"].add_argument("folder", type=Path)
    args = parser.parse_args()
    if args.command == "check":
        return 0 if check(args.baseline, args.only, args.jobs, args.words, args.messages) else 1
    if args.command == "record":
        src = None if args.src is None else args.src.absolute()
        return 1 if record(args.python, src, args.out, args.only, args.jobs) else 0
    if args.command == "compare":
        same = compare(args.one, args.other, sys.executable, args.src, args.only, args.words, args.messages)
        return 0 if same else 1
    if args.command == "replay":
        print(json.dumps(replay(args.one, args.other, args.logs)))
    elif args.command == "run":
        run(next(load for load in LOADS if load.name == args.name), args.out, args.models)
    elif args.command == "models":
        oracle_loads.make_models(args.folder)
    else:
        print("\n".join(f"{load.name:<22}{load.about}" for load in LOADS))
    return 0


if __name__ == "__main__":
    sys.exit(main())

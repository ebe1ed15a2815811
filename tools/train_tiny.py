"""Trains the bundled model and its draft from nothing: text, tokenizer, weights, held-out losses, chat score.

python tools/train_tiny.py --out DIR [--device cuda] [--minutes 6]       # writes DIR/tiny, DIR/tiny-draft, report, plot
python tools/train_tiny.py --out DIR --device cpu --steps 50 --small-corpus    # a smoke run of about a minute
python tools/train_tiny.py --report docs/measurements/tiny_model.json    # the tables of a written report
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import re
import tarfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tiny_model
import torch
import torch.nn.functional as F
from tiny_corpus import NGrams, Tokens, encode_corpus, train_tokenizer
from tiny_model import DRAFT, TINY, Llama, Shape
from tiny_story import Split
from tiny_text import BEGIN, render_chat
from tokenizers import Tokenizer

SPLITS = {
    "fresh": Split(False, False),
    "unseen pairs": Split(True, False),
    "unseen templates": Split(False, True),
    "both unseen": Split(True, True),
}
SHORT, LONG = 1024, 4096  # window lengths; every fourth step is long, so that all positions are trained
QUESTIONS = Path(__file__).with_name("chat_questions.json")
Json = dict[str, Any]
Loss = Callable[[torch.Tensor], torch.Tensor]


def read_questions() -> list[Json]:
    questions: list[Json] = json.loads(QUESTIONS.read_text(encoding="utf-8"))
    return questions


def prompt_of(question: Json, system: bool = True) -> str:
    """The question as the model sees it; without its opening, what no training document may contain."""
    turns = list(zip(question["turns"][::2], [*question["turns"][1::2], ""]))
    prompt = render_chat(question.get("system", "") if system else "", turns, prompt=True)
    return prompt if system else prompt.removeprefix(BEGIN)


def accepts(question: Json, answer: str) -> bool:
    """Whether the answer holds an accepted phrase as whole words and none of the rejected ones."""

    def holds(phrase: str) -> bool:
        return re.search(rf"(?<!\w){re.escape(phrase.casefold())}(?!\w)", answer.casefold()) is not None

    return any(map(holds, question["accept"])) and not any(map(holds, question.get("reject", [])))


# -- training --------------------------------------------------------------------------------------------------------


class Windows:
    """Random windows of a token stream that lies on the device; each begins where a document begins."""

    def __init__(self, tokens: Tokens, device: str, seed: int) -> None:
        self.ids = torch.from_numpy(tokens.ids.astype(np.int32)).to(device)
        starts = tokens.starts[tokens.starts < len(tokens.ids) - LONG - 1]
        lengths = np.diff(np.append(tokens.starts, len(tokens.ids)))[: len(starts)]
        self.starts = torch.from_numpy(starts).to(device)
        long = starts[lengths > SHORT]
        self.long_starts = torch.from_numpy(long if len(long) else starts).to(device)
        self.random = torch.Generator(device).manual_seed(seed)

    def draw(self, rows: int, length: int) -> torch.Tensor:
        """[rows, length + 1] token ids; half of the rows of long windows begin with a long document.

        In one row of eight, one token in 25 is another one, so that the model learns to go on after a surprise.
        """
        starts = self._draw(self.starts, rows)
        if length == LONG:
            starts = torch.cat((starts[: rows - rows // 2], self._draw(self.long_starts, rows // 2)))
        at = starts[:, None] + torch.arange(length + 1, device=starts.device)
        ids, rate = self.ids[at], torch.zeros(rows, 1, device=at.device)
        rate[::8] = 0.04 if rows > 1 else 0.005
        surprise = torch.rand(ids.shape, generator=self.random, device=at.device) < rate
        others = self.ids[torch.randint(len(self.ids), ids.shape, generator=self.random, device=at.device)]
        return torch.where(surprise, others, ids).long()

    def _draw(self, starts: torch.Tensor, count: int) -> torch.Tensor:
        at = torch.randint(len(starts), (count,), generator=self.random, device=starts.device)
        return starts[at]


def learning_rate(progress: float, step: int, highest: float, warm_up: int) -> float:
    """Linear warm-up, then a cosine down to a fiftieth; progress runs from 0 to 1."""
    return highest * min((step + 1) / warm_up, 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * min(progress, 1.0))))


def head_loss(model: Llama, hidden: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    logits = F.linear(hidden, model.embed_tokens.weight)
    return F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())


def compile_layers(
    layers: Iterable[torch.nn.Module], attempt: Callable[[], Iterable[torch.Tensor]], device: str
) -> bool:
    """Compile layers, and try them with losses and their gradients; where that fails, the run goes on without them."""
    listed = list(layers)
    try:
        torch._dynamo.config.recompile_limit = 64
        for layer in listed:  # they share one compiled code a window length, so this costs seconds
            layer.forward = torch.compile(layer.forward, dynamic=False)
        with torch.autocast(device, torch.bfloat16):
            for loss in attempt():
                loss.backward()
    except Exception as error:  # any failure to compile costs speed, never the run
        print(f"torch.compile failed, training without it: {type(error).__name__}: {error}"[:500], flush=True)
        for layer in listed:
            layer.__dict__.pop("forward", None)
        return False
    return True


def compile_loss(model: Llama, windows: Windows, batch_tokens: int, device: str) -> Loss:
    """The model's loss with compiled layers, tried once at both window lengths; the plain loss where that fails."""
    head = torch.compile(head_loss, dynamic=False)

    def compiled(ids: torch.Tensor) -> torch.Tensor:
        return head(model, model(ids[:, :-1]), ids)

    def attempt() -> Iterator[torch.Tensor]:
        return (compiled(windows.draw(max(1, batch_tokens // length), length)) for length in (SHORT, LONG))

    loss: Loss = compiled if compile_layers(model.layers, attempt, device) else model.loss
    model.zero_grad(set_to_none=True)
    return loss


def train(
    name: str, shape: Shape, tokens: Tokens, device: str, seconds: float, steps: int | None, batch_tokens: int,
    rate: float,
) -> tuple[Llama, Json]:  # fmt: skip
    """One model, for so many seconds or, where given, exactly so many steps; and its loss curve."""
    torch.manual_seed(1)
    model = Llama(shape).to(device)
    windows = Windows(tokens, device, seed=2)
    worth_compiling = device == "cuda" and shape.layers > 2  # the draft trains too briefly to earn it back
    loss_of = compile_loss(model, windows, batch_tokens, device) if worth_compiling else model.loss
    matrices = [w for w in model.parameters() if w.dim() == 2]
    vectors = [w for w in model.parameters() if w.dim() == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95), fused=True)
    warm_up = min(300, (steps or 3000) // 10 + 1)
    curve: list[list[float]] = []
    seen, step, begun = 0, 0, time.perf_counter()
    while True:
        elapsed = time.perf_counter() - begun
        progress = step / steps if steps else elapsed / seconds
        if progress >= 1:
            break
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(progress, step, rate, warm_up)
        length = LONG if step % 4 == 3 else SHORT
        ids = windows.draw(max(1, batch_tokens // length), length)
        with torch.autocast(device, torch.bfloat16):
            loss = loss_of(ids)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        seen += ids.shape[0] * length
        if step % 20 == 0 or step + 1 == steps:
            curve.append([step, seen, round(loss.item(), 4)])  # .item() also keeps the clock honest
        if step % 500 == 0:
            print(f"{name} step {step} loss {curve[-1][2]:.3f} tokens {seen / 1e6:.0f}M {elapsed:.0f}s", flush=True)
        step += 1
    facts = {
        "parameters": tiny_model.parameters(model), "layers": shape.layers, "hidden": shape.hidden, "steps": step,
        "tokens_seen": seen, "seconds": round(time.perf_counter() - begun, 1), "batch_tokens": batch_tokens,
        "learning_rate": rate, "curve": curve,
    }  # fmt: skip
    return model, facts


# -- evaluation ------------------------------------------------------------------------------------------------------


@torch.inference_mode()
def held_out_loss(model: Llama, ids: np.ndarray, device: str) -> float:
    """Mean nats a token over windows of the whole context, one after another."""
    total = 0.0
    for chunk in windows_of(ids, LONG):
        total += float(model.loss(torch.from_numpy(chunk.astype(np.int64))[None].to(device), reduction="sum"))
    return total / (len(ids) - 1)


@torch.inference_mode()
def agreement(target: Llama, draft: Llama, ids: np.ndarray, device: str) -> float:
    """The share of held-out positions where both models' most likely next token is the same."""
    same = 0
    for chunk in windows_of(ids, LONG):
        window = torch.from_numpy(chunk.astype(np.int64))[None, :-1].to(device)
        same += int((target.logits(window).argmax(-1) == draft.logits(window).argmax(-1)).sum())
    return same / (len(ids) - 1)


def windows_of(ids: np.ndarray, length: int) -> Iterator[np.ndarray]:
    for start in range(0, len(ids) - 1, length):
        yield ids[start : start + length + 1]


def chat_score(model: Llama, tokenizer: Tokenizer, questions: list[Json]) -> Json:
    """Greedy answers to the committed questions, and how many are accepted."""
    results = []
    for question in questions:
        answer = tiny_model.answer(model, tokenizer, prompt_of(question))
        results.append({"question": question["turns"][-1], "answer": answer, "right": accepts(question, answer)})
    return {"right": sum(result["right"] for result in results), "of": len(results), "answers": results}


def sample_stories(model: Llama, tokenizer: Tokenizer) -> list[Json]:
    asks = ("Tell me a story about a fox.", "Tell me a story about Mia and a lantern.")
    return [
        {"question": ask, "answer": tiny_model.answer(model, tokenizer, render_chat("", [(ask, "")], prompt=True), 300)}
        for ask in asks
    ]


def plot(report: Json, path: Path) -> None:
    """Training loss against tokens, with the trigram's held-out loss as a line."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5))
    for name, facts in report["models"].items():
        curve = np.array(facts["curve"])
        width = max(1, min(25, len(curve) // 4))
        smooth = np.convolve(curve[:, 2], np.ones(width) / width, mode="valid")
        axes.plot(curve[width - 1 :, 1] / 1e6, smooth, label=f"{name} (training)")
    for style, name in ((":", "bigram"), ("--", "trigram")):
        axes.axhline(report["held_out"]["fresh"][name], linestyle=style, color="grey", label=f"{name} (held out)")
    axes.set(xlabel="million tokens seen", ylabel="loss, nats a token", yscale="log", title="The bundled models")
    axes.legend()
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def markdown(report: Json) -> str:
    """Return the tables of a report as Markdown."""
    parts = [
        table(
            ("model", "parameters", "layers", "hidden", "steps", "tokens seen", "seconds"),
            [(name, f"{facts['parameters']:,}", facts["layers"], facts["hidden"], f"{facts['steps']:,}",
              f"{facts['tokens_seen']:,}", f"{facts['seconds']:.0f}") for name, facts in report["models"].items()],
        ),
        table(
            ("held-out text", *(names := ("bigram", "trigram", "tiny-draft", "tiny"))),
            [(split, *(f"{losses[name]:.3f}" for name in names)) for split, losses in report["held_out"].items()],
        ),
        table(
            ("chat questions", "right", "of"),
            [(name, score["right"], score["of"]) for name, score in report["chat"].items()],
        ),
        table(
            ("held-out text", "the draft's most likely token is tiny's"),
            [(split, f"{100 * share:.1f} %") for split, share in report["agreement"].items()],
        ),
    ]  # fmt: skip
    corpus = report["corpus"]
    parts.append(
        f"Corpus: {corpus['characters']:,} characters, {corpus['tokens']:,} tokens, vocabulary {corpus['vocab']}; the "
        f"run took {report['seconds']:.0f} s in all on {report['device']}."
    )
    return "\n\n".join(parts)


def table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Return a Markdown table whose columns but the first are numbers."""
    lines = [" | ".join(map(str, row)) for row in (head, *rows)]
    return "\n".join([f"| {lines[0]} |", "|---" + "|--:" * (len(head) - 1) + "|", *(f"| {row} |" for row in lines[1:])])


# -- the whole run ---------------------------------------------------------------------------------------------------


def run(options: argparse.Namespace) -> Json:
    begun = time.perf_counter()
    out, device, small = Path(options.out), options.device, options.small_corpus
    out.mkdir(parents=True, exist_ok=True)
    torch.set_float32_matmul_precision("high")
    cores = options.cores or len(os.sched_getaffinity(0))
    questions = read_questions()
    without = frozenset(prompt_of(question, system=False) for question in questions)
    characters = 2_000_000 if small else options.characters
    if options.tokenizer:
        tokenizer = Tokenizer.from_file(options.tokenizer)
    else:
        tokenizer = train_tokenizer(TINY.vocab, 1_000_000 if small else 30_000_000, without)
    tokens = encode_corpus(tokenizer, characters, 1000, without, cores=cores)
    amount = 60_000 if small else 600_000
    held_out = {
        name: encode_corpus(tokenizer, amount, 900 + index, without, split)
        for index, (name, split) in enumerate(SPLITS.items())
    }
    ngrams = NGrams(tokens.ids[:60_000_000], TINY.vocab)
    losses = {name: ngrams.losses(held.ids) for name, held in held_out.items()}
    print(f"corpus: {len(tokens.ids):,} tokens, {time.perf_counter() - begun:.0f}s; {losses}", flush=True)

    batch = options.batch_tokens or (LONG if device == "cpu" else 65536)
    plans = {"tiny": (TINY, 5 / 6, 3e-3), "tiny-draft": (DRAFT, 1 / 6, 5e-3)}
    report: Json = {"models": {}, "held_out": losses, "chat": {}}
    judged: dict[str, Llama] = {}
    for name, (shape, share, rate) in plans.items():
        model, facts = train(name, shape, tokens, device, options.minutes * 60 * share, options.steps, batch, rate)
        report["models"][name] = facts
        tiny_model.save(model, tokenizer, out / name)
        final = judged[name] = Llama(shape).to(device)  # judged as saved: rounded to bf16, computed in fp32
        final.load_state_dict({key: w.to(torch.bfloat16).float() for key, w in model.state_dict().items()})
        final.eval()
        for split, held in held_out.items():
            losses[split][name] = round(held_out_loss(final, held.ids, device), 4)
        report["chat"][name] = chat_score(final, tokenizer, questions)
        right = report["chat"][name]["right"]
        print(f"{name}: {right} of {len(questions)}, {time.perf_counter() - begun:.0f}s", flush=True)
        if name == "tiny":
            report["stories"] = sample_stories(final, tokenizer)
    report["agreement"] = {
        split: round(agreement(judged["tiny"], judged["tiny-draft"], held.ids, device), 4)
        for split, held in held_out.items()
    }
    report["corpus"] = {"characters": characters, "tokens": len(tokens.ids), "vocab": TINY.vocab,
                        "held_out_characters": amount}  # fmt: skip
    gpu = torch.cuda.get_device_name() if device == "cuda" else f"{cores} cores of {platform.machine()}"
    report |= {"device": gpu, "torch": torch.__version__, "seconds": round(time.perf_counter() - begun, 1)}
    report["command"] = f"python tools/train_tiny.py --device {device} --minutes {options.minutes:g}"
    if options.tokenizer:
        report["command"] += f" --tokenizer {options.tokenizer}"
    (out / "report.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    plot(report, out / "loss.png")
    return report


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Train the bundled model and its draft.")
    parser.add_argument("--out", help="folder to write")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cuda", "cpu"))
    parser.add_argument("--minutes", type=float, default=6.0, help="training time of both models together")
    parser.add_argument("--steps", type=int, help="train each model for exactly so many steps instead")
    parser.add_argument("--characters", type=int, default=800_000_000, help="size of the training text")
    parser.add_argument("--small-corpus", action="store_true", help="a small text, for smoke runs")
    parser.add_argument("--tokenizer", metavar="FILE", help="keep this tokenizer.json instead of training one")
    parser.add_argument("--batch-tokens", type=int, help="tokens a step (default 65536, on a CPU 4096)")
    parser.add_argument("--cores", type=int, help="processes that write text (default: all cores)")
    parser.add_argument("--archive", help="also write the folder as one uncompressed tar file")
    parser.add_argument("--report", help="print the tables of a written report and stop")
    options = parser.parse_args(arguments)
    if options.report:
        print(markdown(json.loads(Path(options.report).read_text(encoding="utf-8"))))
        return
    if not options.out:
        parser.error("--out is needed")
    try:
        report = run(options)
    finally:  # what a broken run has written is worth having too
        if options.archive:
            with tarfile.open(options.archive, "w") as archive:
                archive.add(options.out, arcname=".")
    print(markdown(report))
    for result in report["chat"]["tiny"]["answers"]:
        if not result["right"]:
            print(f"wrong: {result['question'][-80:]!r} -> {result['answer']!r}")


if __name__ == "__main__":
    main()

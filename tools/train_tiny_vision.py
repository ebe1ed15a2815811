"""Trains the bundled vision model on pictures that it draws, judges it on held-out ones, and writes its folder.

python tools/train_tiny_vision.py --out DIR [--minutes 5]         # on a GPU; writes DIR/tiny-vision, DIR/report.json
python tools/train_tiny_vision.py --out DIR --from DIR2/tiny-vision --seed 2    # goes on from a saved model
python tools/train_tiny_vision.py --out DIR --device cpu --steps 5 --small      # a smoke run of about a minute
python tools/train_tiny_vision.py --report docs/measurements/tiny_vision.json   # the tables of a written report
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import tiny_vision_model
import torch
import torch.nn.functional as F
import transformers
from numpy.typing import NDArray
from tiny_picture_chat import Turn
from tiny_pictures import COLOURS, HELD_OUT, SHAPES, TRAIN
from tiny_tiles import MEAN, STD
from tiny_vision_data import (
    ROW,
    UNKNOWN,
    Codec,
    Drawers,
    Rows,
    judged_row,
    judged_rows_at_once,
    like_words,
    to_device,
    without_pictures,
)
from tiny_vision_model import load, logits_at, read, save, see
from train_tiny import compile_layers, learning_rate, table
from transformers import LlavaOnevisionForConditionalGeneration

Json = dict[str, Any]
Batch = dict[str, torch.Tensor]
Exam = tuple[NDArray[Any], list[Turn]]  # rows of one question each, and the questions
CLASSES = (1 + len(COLOURS), 1 + len(SHAPES), 3)  # of a patch's three labels
MISREAD, MISSED = 0.15, 0.1  # of an answer's colours, numbers and so on; of all its words
NO_PICTURES, GENERATED = 300, 32  # judged conversations without a picture; answers that transformers decodes
JUDGED_SEED = 10_000_000  # far from those of training


class Student(torch.nn.Module):
    """The model, and a linear head on its tower that says what each patch shows. The head is for training alone: it
    teaches the tower to see long before the answers could."""

    likes: torch.Tensor
    sizes: torch.Tensor
    begins: torch.Tensor

    def __init__(self, model: LlavaOnevisionForConditionalGeneration) -> None:
        super().__init__()
        self.model = model
        self.pad = model.config.pad_token_id
        for name, found in zip(("likes", "sizes", "begins"), like_words()):
            self.register_buffer(name, found)
        self.patches = torch.nn.Linear(model.model.vision_tower.config.hidden_size, sum(CLASSES))

    def losses(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Mean nats a token of the answers, and the sum of the patch labels' mean nats."""
        seen = see(self.model, batch["tiles"])
        hidden = read(self.model, self.misread(batch), batch["feature"].long(), seen)
        asked = batch["answer"][:, 1:] > 0
        words = F.cross_entropy(logits_at(self.model, hidden[:, :-1][asked]), batch["ids"][:, 1:][asked].long())
        told = self.patches(seen).float().flatten(0, 2).split(CLASSES, dim=-1)
        labels = batch["labels"].flatten(0, 2).long()
        labels = labels.masked_fill(labels == UNKNOWN, -100)
        patches = [F.cross_entropy(one, labels[:, i]) for i, one in enumerate(told)]
        return words, torch.stack(patches).sum()

    def misread(self, batch: Batch) -> torch.Tensor:
        """The tokens as the model reads them: now and then an answer has another colour, number, shape or place than
        it gave, where both are words of one token, or lacks a word. So what comes next has to be seen in the picture;
        else pairs that never met would be held to be impossible."""
        ids = batch["ids"].long()
        sizes, answers = self.sizes[ids], batch["answer"] > 0
        another = (torch.rand(ids.shape, device=ids.device) * sizes).long()
        swapped = (sizes > 0) & (torch.rand(ids.shape, device=ids.device) < MISREAD)
        words = self.begins[ids].cumsum(1)  # which one a token belongs to
        missed = torch.rand((len(ids), ids.shape[1] + 1), device=ids.device).gather(1, words) < MISSED
        read = torch.where(swapped, self.likes[ids, another], ids).masked_fill(missed, self.pad)
        return torch.where(answers, read, ids)


def train(student: Student, rows: Rows, options: argparse.Namespace, folder: Path) -> Json:
    """For so many minutes or, where given, exactly so many steps; the model is saved every 2,000 steps."""
    device, seconds = options.device, options.minutes * 60
    matrices = [w for w in student.parameters() if w.dim() >= 2]
    vectors = [w for w in student.parameters() if w.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.05}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=options.rate, betas=(0.9, 0.98), fused=True)
    if options.compile:
        inner, batch = student.model.model, rows.draw(options.batch)
        layers = [*inner.vision_tower.encoder.layers, *inner.language_model.layers]
        compile_layers(layers, lambda: [torch.stack(student.losses(batch)).sum()], device)
        student.zero_grad(set_to_none=True)
    curve: list[list[float]] = []
    warm_up = min(300, (options.steps or 3000) // 10 + 1)
    step, begun = 0, time.perf_counter()
    while True:
        elapsed = time.perf_counter() - begun
        progress = step / options.steps if options.steps else elapsed / seconds
        if progress >= 1:
            break
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(progress, step, options.rate, warm_up)
        rows.take()
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            words, patches = student.losses(rows.draw(options.batch))
        (words + (0.1 + 0.9 * max(0.0, 1 - 3 * progress)) * patches).backward()
        torch.nn.utils.clip_grad_norm_(student.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 10 == 0 or step + 1 == options.steps:
            curve.append([step, rows.drawn, round(words.item(), 4), round(patches.item(), 4)])
        if step % 500 == 0 or (step % 10 == 0 and device == "cpu"):
            told = f"answers {curve[-1][2]:.4f} patches {curve[-1][3]:.4f}"
            print(f"step {step} {told} drawn {rows.drawn:,} {elapsed:.0f}s", flush=True)
        if step % 2000 == 1999:
            save(student.model, folder)
        step += 1
    return {
        "parameters": sum(weight.numel() for weight in student.model.parameters()), "steps": step,
        "seconds": round(time.perf_counter() - begun, 1), "batch": options.batch, "learning_rate": options.rate,
        "seed": options.seed, "pictures_drawn": rows.drawn, "pictures_seen": step * options.batch, "curve": curve,
    }  # fmt: skip


# -- judging ---------------------------------------------------------------------------------------------------------


@torch.inference_mode()
def judge(
    model: LlavaOnevisionForConditionalGeneration, rows: NDArray[Any], turns: list[Turn], device: str
) -> tuple[Json, list[str]]:
    """Right answers by kind of question: every token is the most likely one, as greedy decoding would pick it. And
    lines that show some of the wrong ones."""
    right, of = Counter[str](), Counter[str]()
    wrong: list[str] = []
    decode = Codec().tokenizer.decode
    for start in range(0, len(rows), 128):
        batch = to_device(rows[start : start + 128], device)
        hidden = read(model, batch["ids"].long(), batch["feature"].long(), see(model, batch["tiles"]))
        best = logits_at(model, hidden[:, :-1]).argmax(-1)
        asked = batch["answer"][:, 1:] > 0
        same = ((best == batch["ids"][:, 1:]) | ~asked).all(1).tolist()
        for index, (turn, good) in enumerate(zip(turns[start : start + 128], same)):
            of[turn.kind] += 1
            right[turn.kind] += good
            if not good and len(wrong) < 40:
                wrong.append(f"{turn.question} | {turn.answer} | {decode(best[index][asked[index]].tolist())}")
    return {kind: {"right": right[kind], "of": of[kind]} for kind in sorted(of)}, wrong


@torch.inference_mode()
def as_generated(model: LlavaOnevisionForConditionalGeneration, seed: int, number: int, device: str) -> int:
    """How many held-out questions transformers' own pass and greedy decoding answer right."""
    rng, codec, row, right = random.Random(seed), Codec(), np.zeros(1, ROW)[0], 0
    for _ in range(number):
        _, picture = judged_row(rng, row, codec, HELD_OUT)
        first, last = (int(at) for at in np.flatnonzero(row["answer"])[[0, -1]])
        tiles = torch.from_numpy(row["tiles"]).permute(0, 3, 1, 2)[None].float() / 255
        ids = torch.from_numpy(row["ids"][None, :first].astype(np.int64)).to(device)
        given = model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), pixel_values=((tiles - MEAN) / STD).to(device),
            image_sizes=torch.tensor([picture.owners.shape], device=device), max_new_tokens=last + 1 - first,
            do_sample=False,
        )  # fmt: skip
        right += given[0, first:].tolist() == row["ids"][first : last + 1].tolist()
    return right


def share(kinds: Json) -> float:
    right: int = sum(kind["right"] for kind in kinds.values())
    of: int = sum(kind["of"] for kind in kinds.values())
    return right / max(1, of)


def markdown(report: Json) -> str:
    """Return the tables of a report as Markdown."""
    facts, judged = report["training"], report["judged"]
    lines = [
        "| parameters | steps | pictures drawn | pictures seen | seconds | held out | fresh |",
        "|--:|--:|--:|--:|--:|--:|--:|",
        f"| {facts['parameters']:,} | {facts['steps']:,} | {facts['pictures_drawn']:,} | {facts['pictures_seen']:,} "
        f"| {facts['seconds']:.0f} | {100 * share(judged['held out']):.1f} % | {100 * share(judged['fresh']):.1f} % |",
    ]
    rows = []
    for kind in judged["fresh"]:
        row = [kind]
        for split in ("held out", "fresh"):
            one = judged[split].get(kind, {"right": 0, "of": 0})
            row += [f"{100 * one['right'] / one['of']:.1f} %" if one["of"] else "-", f"{one['of']:,}"]
        rows.append(row)
    alone, said = report["no_picture"], report["generated"]
    lines += ["", table(("kind of question", "held out", "of", "fresh", "of"), rows), ""]
    return "\n".join(lines) + (
        f"\nWithout a picture: {alone['right']} of {alone['of']}. Decoded by transformers: {said['right']} of "
        f"{said['of']} held-out answers right. The run took {report['seconds']:.0f} s in all on {report['device']}."
    )


# -- the whole run ---------------------------------------------------------------------------------------------------


def judged(model: LlavaOnevisionForConditionalGeneration, exams: dict[str, Exam], device: str) -> Json:
    """The model as saved (rounded to bf16, computed in fp32) on both splits, on no picture, and as generated."""
    report: Json = {"judged": {}, "wrong": {}}
    for name, exam in exams.items():
        report["judged"][name], report["wrong"][name] = judge(model, *exam, device)
    alone, _ = judge(model, *without_pictures(JUDGED_SEED, NO_PICTURES), device)
    report["no_picture"] = alone["no picture"]
    report["generated"] = {"right": as_generated(model, JUDGED_SEED, GENERATED, device), "of": GENERATED}
    return report


def run(options: argparse.Namespace) -> Json:
    begun = time.perf_counter()
    out, device = Path(options.out), options.device
    folder = out / "tiny-vision"
    folder.mkdir(parents=True, exist_ok=True)
    torch.set_float32_matmul_precision("high")
    workers = options.workers or max(1, len(os.sched_getaffinity(0)) - 1)
    exams = {
        name: judged_rows_at_once(JUDGED_SEED + 100 * index, 64 if options.small else 4000, split, workers)
        for index, (name, split) in enumerate((("held out", HELD_OUT), ("fresh", TRAIN)))
    }
    drawers = Drawers(workers, 1000 + 1000 * options.seed, 16 if options.small else 256)
    try:
        model = load(Path(options.start)) if options.start else tiny_vision_model.build(options.seed)
        student = Student(model).to(device).train()
        rows = Rows(drawers, 512 if options.small else options.capacity, device, options.seed)
        while rows.held < (64 if options.small else 16_384):
            rows.take(wait=True)
        print(f"{rows.held:,} pictures drawn by {workers} workers, {time.perf_counter() - begun:.0f}s", flush=True)
        facts = train(student, rows, options, folder)
    finally:
        drawers.close()
    save(model, folder)
    final = load(folder).to(device).eval()
    report = {"training": facts, **judged(final, exams, device)}
    report["device"] = torch.cuda.get_device_name() if device == "cuda" else platform.processor() or "CPU"
    report["versions"] = {"torch": torch.__version__, "transformers": transformers.__version__}
    report["seconds"] = round(time.perf_counter() - begun, 1)
    (out / "report.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", help="the folder to write into")
    parser.add_argument("--from", dest="start", help="a saved model's folder to go on from")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--minutes", type=float, default=5.0, help="of training; about one more goes into the rest")
    parser.add_argument("--steps", type=int, help="exactly so many steps instead of --minutes")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rate", type=float, default=1.5e-3, help="the highest learning rate")
    parser.add_argument("--batch", type=int, help="pictures a step")
    parser.add_argument("--workers", type=int, help="processes that draw; one less than the cores by default")
    parser.add_argument("--capacity", type=int, default=600_000, help="pictures kept on the device, 37 kB each")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, help="compile the layers; on a GPU it does")
    parser.add_argument("--small", action="store_true", help="little of everything, to try it without a GPU")
    parser.add_argument("--report", help="print the tables of this report and leave")
    options = parser.parse_args()
    if options.report:
        print(markdown(json.loads(Path(options.report).read_text(encoding="utf-8"))))
        return
    if not options.out:
        parser.error("--out is needed")
    options.batch = options.batch or (8 if options.small else 256)
    options.compile = options.device == "cuda" if options.compile is None else options.compile
    print(markdown(run(options)))


if __name__ == "__main__":
    main()

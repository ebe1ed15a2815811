"""A small transformer of random weights decodes over virtual memory with torch's own attention, which knows nothing of
pages: they are mapped under its tensors as requests grow. `python examples/virtual_memory.py`; with `cuda`, on a GPU.
"""

import sys
from contextlib import closing

import torch
from torch.nn import Embedding, Linear, Module, ModuleList
from torch.nn.functional import rms_norm, scaled_dot_product_attention, silu

from quire.vattention import init

LAYERS, REQUESTS, LONGEST, HEADS, DIM, WIDTH, WORDS = 3, 4, 512, 4, 32, 128, 1000


class Transformer(Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.places, self.scores = Embedding(WORDS, WIDTH), Embedding(LONGEST, WIDTH), Linear(WIDTH, WORDS)
        sizes = (1, 3), (1, 1), (1, 4), (4, 1)
        self.layers = ModuleList(ModuleList(Linear(WIDTH * a, WIDTH * b) for a, b in sizes) for _ in range(LAYERS))

    def forward(self, tokens: torch.Tensor, start: int, kept: list[torch.Tensor]) -> torch.Tensor:
        """The next word's scores. `tokens` follow `start` others; `kept`: each layer's keys and values, [L, H, D]."""
        x = self.words(tokens) + self.places.weight[start : (end := start + len(tokens))]
        for (qkv, out, up, down), keys, values in zip(self.layers, kept[::2], kept[1::2]):
            query, keys[start:end], values[start:end] = qkv(rms_norm(x, (WIDTH,))).view(-1, 3, HEADS, DIM).unbind(1)
            seen = (each.transpose(0, 1)[None] for each in (query, keys[:end], values[:end]))
            heads = scaled_dot_product_attention(*seen, is_causal=len(tokens) > 1)[0]
            x = x + out(heads.transpose(0, 1).reshape(-1, WIDTH))
            x = x + down(silu(up(rms_norm(x, (WIDTH,)))))
        return self.scores(x[-1])


@torch.inference_mode()
def main(device: str = "cpu") -> tuple[list[list[int]], float]:
    """The requests' tokens, and the most that a score differs from one over ordinary tensors."""
    torch.manual_seed(0)
    model, worst, page = Transformer().to(device), 0.0, 4096 if device == "cpu" else 2**21
    plain = [torch.zeros(REQUESTS, LONGEST, HEADS, DIM, device=device) for _ in range(2 * LAYERS)]
    with closing(init(LAYERS, REQUESTS, LONGEST, HEADS, DIM, 4, page, pages=50, device=device)) as memory:
        texts = {memory.alloc_reqid(): list(range(length, 3 * length)) for length in (5, 60, 33)}
        starts = dict.fromkeys(texts, 0)
        for _ in range(40):  # the prompts in the first step, a token of each in the others
            assert memory.step([len(texts.get(reqid, ())) for reqid in range(REQUESTS)]) == 0, "out of pages"
            for reqid, text in texts.items():
                tokens = torch.tensor(text[starts[reqid] :], device=device)
                ways = ([each[reqid] for each in tensors] for tensors in (memory.tensors, plain))
                scores, same = (model(tokens, starts[reqid], kept) for kept in ways)
                worst, starts[reqid] = max(worst, float((scores - same).abs().max())), len(text)
                text.append(int(scores.argmax()))
            memory.map_ahead()
        print(f"{sum(starts.values())} tokens, scores differ by {worst:.1g} at most; {memory.counts()}")
        return list(texts.values()), worst


if __name__ == "__main__":
    main(*sys.argv[1:2])

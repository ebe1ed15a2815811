"""Two decoding methods that quire doesn't have, on its primitives: diverse beam search as a Method, and a best-first
tree search in a session. Run it: `python examples/custom_decoding.py "Once upon a time"`.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence

from quire import LLM, SamplingParams
from quire.protocol.method import Advance, Branch, Choice, Context, Ending
from quire.text.session import Node


class DiverseBeams:
    """Diverse beam search (Vijayakumar et al. 2016): groups of beams; a token that earlier groups took in this step
    costs `penalty` for each time. A beam that ends leaves its group."""

    def __init__(self, groups: int = 3, beams: int = 2, penalty: float = 1.0) -> None:
        self.groups, self.beams, self.penalty = groups, beams, penalty
        self.width = groups * beams
        self.members: list[int] = []  # the group of each live branch; none at first, when one branch serves all

    def top(self, context: Context) -> int:
        """At most width - beams tokens of a branch are taken by other groups."""
        return self.width

    def keep(self) -> int:
        """All beams are results."""
        return self.width

    def advance(self, branches: Sequence[Branch], context: Context) -> Advance:
        """One step: each group in turn continues its best beams."""
        outputs = len(branches[0].tokens) - branches[0].prompt_len + 1
        taken, members = Counter[int](), list[int]()
        choices, endings = list[Choice](), list[Ending]()
        for group in range(self.groups):
            mine = [i for i in range(len(branches)) if not self.members or self.members[i] == group]
            room = self.beams if not self.members else len(mine)
            candidates = [
                (branches[i].logprob + logprob - self.penalty * taken[token], i, token, logprob)
                for i in mine
                for token, logprob in zip(branches[i].top.ids, branches[i].top.logprobs)
            ]
            best = sorted(candidates, key=lambda candidate: -candidate[0])[:room]
            for _, i, token, logprob in best:
                ends = token in context.eos_ids | context.stop_ids
                if ends or outputs == context.max_tokens:
                    score = (branches[i].logprob + logprob) / outputs
                    endings.append(Ending(i, token, logprob, score, "stop" if ends else "length"))
                else:
                    choices.append(Choice(i, token, logprob))
                    members.append(group)
            taken.update(token for _, _, token, _ in best)
        self.members = members
        return Advance(tuple(choices), tuple(endings))


def best_first(root: Node, steps: int, branching: int, leaves: int) -> tuple[float, list[int]]:
    """Of a tree of continuations, expand the leaf of the best mean log-probability, `steps` times; at most `leaves`
    are kept. Returns the best leaf's mean and tokens. The session needs a width of leaves + branching."""
    frontier = [(0.0, root)]
    for _ in range(steps):
        frontier.sort(key=lambda leaf: -leaf[0] / max(len(leaf[1].tokens), 1))
        total, node = frontier.pop(0)
        top = node.next(branching)
        for token, logprob in zip(top.ids, top.logprobs):
            child = node.fork()
            child.append(token)
            frontier.append((total + logprob, child))
        node.free()
        for _, leaf in frontier[leaves:]:
            leaf.free()
        del frontier[leaves:]
    total, leaf = max(frontier, key=lambda leaf: leaf[0] / len(leaf[1].tokens))
    return total / len(leaf.tokens), leaf.tokens


def main(prompt: str) -> None:
    """Both methods on the bundled model."""
    with LLM(kv_tokens=4096) as llm:
        assert llm.tokenizer is not None
        params = SamplingParams(n=6, method=DiverseBeams, max_tokens=24)
        print("diverse beams, the likeliest first:")
        for output in llm.generate(prompt, params, use_tqdm=False)[0].outputs:
            print(f"  {output.cumulative_logprob:7.2f}  {output.text!r}")
        with llm.session(prompt, width=12, max_tokens=32) as root:
            mean, tokens = best_first(root, steps=32, branching=3, leaves=8)
        print(f"best-first search, {mean:.2f} a token:\n  {llm.tokenizer.decode(tokens)!r}")


if __name__ == "__main__":
    main(" ".join(sys.argv[1:]) or "Once upon a time")

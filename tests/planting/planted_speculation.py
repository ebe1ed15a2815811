"""Bugs planted in speculative decoding: in the scheduler, in the choice of draft tokens, in the text of runs of tokens,
in the verification of a model's samples, and in the runner that stands for a model and its draft model."""

from __future__ import annotations

from bugs import Bug, bug

TESTS = "tests/core/test_speculation.py::"
SINGLE_STEPS = TESTS + "test_tokens_are_those_of_single_steps"
RIGHT_DRAFTS = TESTS + "test_tokens_are_those_of_single_steps_if_many_drafts_are_right[0.3-recompute]"
OTHER_TOKENS = r"AssertionError: request .*, branch .*: \[.*\] instead of \["
SCHEDULER, CHOICE, ECHO = "core/scheduler.py", "core/speculation.py", "../../bench/echo_runner.py"
VERIFICATION = "worker/verification.py"
REPLAY = "worker/state_replay.py"
STATE_TRACES = "tests/conformance/test_drafts.py::test_traces_with_a_draft_model[draft-states-alone-seeds0]"
STATES = "tests/test_state_speculation.py::test_other_memories[mamba-{'state_tokens': 4}]"
OTHER_STATE = r"AssertionError: slot \d+ needs the state of \d+ tokens, its page has that of \d+"
KNOWN_DRAFTS = "tests/worker/test_draft_tokens.py::test_known_drafts_change_nothing[reference-False]"

BUGS: dict[str, Bug] = {
    "one draft token too many is accepted": bug(
        ECHO,
        "return tuple(samples[: accepted + 1]), states[: accepted + 1]",
        "return tuple(samples[: accepted + 2]), states[: accepted + 2]",
        RIGHT_DRAFTS,
        OTHER_TOKENS,
    ),
    "the token after a run is that of the last row": bug(
        ECHO,
        "return tuple(samples[: accepted + 1]), states[: accepted + 1]",
        "return (*samples[:accepted], samples[-1]), states[: accepted + 1]",
        RIGHT_DRAFTS,
        OTHER_TOKENS,
    ),
    "a draft token is accepted after a wrong one": bug(
        ECHO,
        "accepted += accepted == i and drafts[i] == samples[i]",
        "accepted += drafts[i] == samples[i]",
        RIGHT_DRAFTS,
        OTHER_TOKENS,
    ),
    "the device remembers rejected tokens": bug(
        ECHO,
        "history = None if slot.history is None else list(slot.history)",
        "history = slot.history",
        RIGHT_DRAFTS,
        OTHER_TOKENS,
    ),
    "a page of rejected tokens counts as computed": bug(
        SCHEDULER,
        "seq.computed = seq.planned = min(end, row.start + 1 + len(tokens))",
        "seq.computed = seq.planned = row.start + 1 + len(row.draft_tokens)",
        TESTS + "test_a_rejected_tail_is_not_published",
        r"AssertionError: a token that the sequence never got is published",
    ),
    "pages are published before the tokens of a run are appended": bug(
        SCHEDULER,
        "        if seq.finish_reason is None:\n            if can_append_all(",
        "        seq.computed = end\n        self.memory.commit(seq)\n"
        "        if seq.finish_reason is None:\n            if can_append_all(",
        TESTS + "test_right_drafts_save_steps[1]",
        r"AssertionError: a token that the sequence never got is published",
    ),
    "a stop token in the middle of a run is ignored": bug(
        SCHEDULER,
        "                    if seq.finish_reason is not None:\n                        break\n",
        "",
        TESTS + "test_a_stop_token_ends_a_run_in_its_middle[3]",
        OTHER_TOKENS,
    ),
    "another step is planned while drafts are in flight": bug(
        SCHEDULER,
        "self.pp_size == 1 and (self.drafts_in_flight or chosen is not NO_DRAFTS):",
        "self.pp_size == 1 and chosen is not NO_DRAFTS:",
        TESTS + "test_a_request_ends_while_its_drafts_are_in_flight[abort]",
        r"AssertionError: another step is planned",
    ),
    "drafts take the memory of other sequences": bug(
        SCHEDULER,
        "if draft_tokens and self.memory.grow(seq, end):",
        "if draft_tokens:",
        RIGHT_DRAFTS,
        r"AssertionError: slot .* uses its page|IndexError",
    ),
    "proposals take the memory of other sequences": bug(
        SCHEDULER,
        "if count and self.memory.grow(seq, end + count):",
        "if count:",
        SINGLE_STEPS + "[draft-4-1]",
        r"AssertionError: (slot .* uses its page|a token of slot .* is torn)|IndexError",
    ),
    "a sequence keeps its proposals without its slot": bug(
        SCHEDULER,
        "slot, seq.proposed = self.memory.slot(seq), 0",
        "slot = self.memory.slot(seq)",
        TESTS + "test_branches_that_wait_for_a_common_prefix_draft_from_where_the_first_does[1]",
        r"assert \(20, 5\) == \(20, 4\)",
    ),
    "proposals are verified a second time": bug(
        CHOICE,
        "            seq.proposed = 0\n",
        "",
        SINGLE_STEPS + "[draft-4-1]",
        r"AssertionError: slot .* has 0 proposals",
    ),
    "tokens are drafted that the request may not have": bug(
        CHOICE,
        "request.max_tokens, max_len) - length - 1",
        "request.max_tokens, max_len) - length",
        TESTS + "test_drafts_are_at_most_what_a_sequence_may_have",
        r"assert \[0, 1, 2, 3, 4\] == \[0, 0, 1, 2, 4\]",
    ),
    "the draft model has computed its last proposal": bug(
        CHOICE,
        "seq.draft_planned = seq.drafted + (seq.proposed > 0)",
        "seq.draft_planned = seq.drafted + 2 * (seq.proposed > 0)",
        SINGLE_STEPS + "[draft-4-1]",
        r"AssertionError: (the draft model read other states|a token of slot .* is torn)",
    ),
    "the draft model goes on where it was before a step without it": bug(
        CHOICE,
        "            if seq.not_in_flight:\n                seq.draft_planned",
        "            if seq.drafted == 0:\n                seq.draft_planned",
        SINGLE_STEPS + "[both-16-2]",
        r"AssertionError: (page .* is published before it is computed|the draft model read other states)",
    ),
    "a mask is that of the position before": bug(
        ECHO,
        "history, self.vocab_size, masks[i]))",
        "history, self.vocab_size, masks[max(i - 1, 0)]))",
        TESTS + "test_drafts_follow_grammars[ngram-1-False]",
        r"AssertionError: request .*, branch ",
    ),
    "a mask after a token of the draft model is that of the position before": bug(
        "core/grammar_masks.py",
        "indices += [min(first + i, len(matchers) - 1) for i in range(num_masks)]",
        "indices += [min(first + max(i - 1, 0), len(matchers) - 1) for i in range(num_masks)]",
        TESTS + "test_drafts_follow_grammars[draft-2-True]",
        r"AssertionError: request .*, branch ",
    ),
    "tokens are drafted that the grammar refuses": bug(
        "core/grammar_masks.py",
        "        if token in eos_ids or matcher.accept(token):\n            return draft_tokens[:i]\n",
        "        matcher.accept(token)\n",
        TESTS + "test_drafts_follow_grammars[ngram-1-False]",
        r"AssertionError: slot .* has a draft token that its grammar refuses: (token .* can't|it is an end)",
    ),
    "a grammar forces tokens in the middle of a run": bug(
        SCHEDULER,
        "                    if i == accepted:",
        "                    if i >= 0:",
        TESTS + "test_a_grammar_forces_tokens_after_a_run_only[0.0]",
        OTHER_TOKENS,
    ),
    "tokens of a run are kept after a stop string": bug(
        "text/request_detokenizer.py",
        "tokens, tops = tokens[:num_read], tops[:num_read]",
        "tops = tops[:num_read]",
        "tests/text/test_stream.py::test_a_stop_string_may_begin_in_one_run_of_tokens_and_end_in_the_next",
        r"assert \[.*\] == \[",
    ),
    "an n-gram is proposed again from the place where it was first": bug(
        CHOICE,
        "                ends[key] = end\n",
        "                ends.setdefault(key, end)\n",
        TESTS + "test_ngrams_are_found_as_by_search[lookup1]",
        r"assert \[.*\] == \[",
    ),
    "a result has one token more than is accepted": bug(
        VERIFICATION,
        "of_slice[: 1 + next(next_accepted)]",
        "of_slice[: 2 + next(next_accepted)]",
        KNOWN_DRAFTS,
        r"assert tensor\(\d+\) == \d+",
    ),
    "a model's draft token is accepted after a wrong one": bug(
        VERIFICATION,
        "accepted: np.ndarray = agrees.cumprod(1).sum(1)",
        "accepted: np.ndarray = agrees.sum(1)",
        KNOWN_DRAFTS,
        r"assert \[\[.*\] == \[\[",
    ),
    "a model's first draft token is accepted without a look": bug(
        VERIFICATION,
        "agrees = (samples == drafts) & (self.drafts != NO_TOKEN)",
        "agrees = ((samples == drafts) | (np.arange(drafts.shape[1]) == 0)) & (self.drafts != NO_TOKEN)",
        KNOWN_DRAFTS,
        r"assert \[\[.*\] == \[\[",
    ),
    "a model goes on with the token of another row": bug(
        VERIFICATION,
        "sampled_tokens[0, self.slots] = tokens[self.first_samples + accepted]",
        "sampled_tokens[0, self.slots] = tokens[self.first_samples]",
        KNOWN_DRAFTS,
        r"assert tensor\(\d+\) == \d+",
    ),
    "the state of a rejected token is kept": bug(
        ECHO, "restore_states(drafts[:accepted])", "restore_states(drafts)", STATE_TRACES, OTHER_STATE
    ),
    "a state is a token short": bug(
        ECHO, "restore_states(drafts[:accepted])", "restore_states(drafts[1:accepted])", STATE_TRACES, OTHER_STATE
    ),
    "the state of a rejected token is published": bug(
        SCHEDULER,
        "        if tokens and not sampled.error:\n            self.memory.commit_drafts(seq)\n",
        "        kept, seq.computed = seq.computed, row.start + 1 + len(row.draft_tokens)\n"
        "        self.memory.commit_drafts(seq)\n        seq.computed = kept\n",
        STATE_TRACES,
        r"AssertionError: (page \d+ is published before it is computed|a token that .* never got is published)",
    ),
    "a model's state of a rejected token is kept": bug(
        REPLAY,
        "known_there + torch.as_tensor(accepted)",
        "known_there + torch.as_tensor(verification.num_drafts)",
        STATES,
        r"StopIteration|AssertionError",
    ),
    "a model's state is a token short": bug(
        REPLAY,
        "known_there + torch.as_tensor(accepted)",
        "known_there + torch.as_tensor(accepted) - 1",
        STATES,
        r"StopIteration|AssertionError",
    ),
    "a model's states are advanced by the verification, too": bug(
        "kernels/mamba_states.py",
        "writes = writes.masked_fill(has_drafts[:, None] > 0, -1)",
        "writes = writes.contiguous()",
        STATES,
        r"StopIteration|AssertionError",
    ),
    "a model's states are advanced over another sequence's tokens": bug(
        REPLAY,
        "np.cumsum(lengths) - lengths",
        "np.zeros_like(lengths)",
        STATES,
        r"StopIteration|AssertionError",
    ),
    "a short convolution's inputs are saved before they are gated": bug(
        "layers/short_conv.py",
        "cache.saved.save(plan.saved_tokens, gated)",
        "cache.saved.save(plan.saved_tokens, inner.contiguous())",
        STATES.replace("[mamba-", "[lfm2-"),
        r"StopIteration|AssertionError",
    ),
    "the norm of a group that ranks share is that of a rank's heads": bug(
        "layers/mamba2.py",
        "reduce = self._mean_over_ranks if self.copies and self.exchange is not None else None",
        "reduce = None",
        "tests/test_state_logits.py::test_logits_of_ranks[mamba2, one group, biased-{'max_num_batched_tokens': 7}-2]",
        "AssertionError",
    ),
    "a model's state at the end of a page is not written": bug(
        REPLAY,
        "StatePlan(offsets, advanced, first, *pages, run, tiles)",
        "StatePlan(offsets, advanced, first, pages[0], pages[1][:, -1:], 1 << 40, tiles)",
        STATES,
        r"StopIteration|AssertionError",
    ),
}

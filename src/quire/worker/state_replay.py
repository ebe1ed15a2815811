"""Running states after a verification of draft tokens: those after the accepted tokens, not after the last ones.

A state cannot go back by a token, so a step with draft tokens computes outputs from the states before it and writes no
state of the slices that have drafts. Each layer saves its inputs of their tokens instead. Once the number of accepted
tokens is known, on the device and in the same step, the states are advanced over these tokens by the same kernels. To
the scheduler, the memory and the next step the pages hold what steps of one token would have left: states at the ends
of the runs that were passed, and the latest one; no rejected token was ever in any.

The other way is a copy of the state after each token, the accepted one of which becomes the state. It takes more memory
and traffic. Per token and layer, with states in fp32 and the rest in 16 bits, inputs take 2 d_inner numbers of 2 bytes
and 2 d_state of 4, a copy d_inner d_state numbers of 4 bytes and d_inner (d_conv - 1) of 2:

                       inputs     a copy     over all layers
    Jamba 52B          32,896    573,440     0.92 MB    16.1 MB    (28 layers, d_inner 8192, d_state 16, d_conv 4)
    Mamba 2.8B         20,608    358,400     1.32 MB    22.9 MB    (64 layers, d_inner 5120)

Of Mamba-2 the inputs are those of the convolution, and the steps: in a layer of Granite 4 H-Small 17,152 bytes, where a
copy takes 4.2 MB.

So the most draft tokens of a step (MAX_STEP_DRAFTS) would need 4 to 6 GB of copies. A slice of k draft tokens reads its
state twice and writes it once; with copies it would read it once, write it 1 + k times, and copy one. The price is two
small launches per layer, which the device starts while the host plans the next step.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from quire.kernels.mamba_states import StateCache, StatePlan, make_state_tiles, state_pages
from quire.models.decoder import Decoder
from quire.worker.step_context import StepStates
from quire.worker.store import Store
from quire.worker.verification import Verification


class StateReplay:
    """Advances the states of `model` in the pages of `store`, after verifications of up to `max_drafts` draft tokens of
    a slice."""

    def __init__(self, model: Decoder, store: Store, max_drafts: int) -> None:
        self.model, self.store, self.max_drafts = model, store, max_drafts

    def run(self, verification: Verification, accepted: Tensor | np.ndarray) -> None:
        """Enqueue the computation of the states after `accepted` [V] draft tokens of each slice that has some."""
        columns = verification.state_rows().columns
        slots, starts, lengths = columns[:3, columns[4] > 0]
        known = lengths - verification.num_drafts
        # Not the longest of this step: kernels are compiled for the table's width.
        longest = int(known.max()) + self.max_drafts
        numbers = np.stack((slots, starts, known, np.cumsum(lengths) - lengths))
        uploaded, tiles = self.store.staging.upload_all([numbers, make_state_tiles(np.ones_like(lengths))])
        there, first, known_there, offsets = uploaded
        advanced = known_there + torch.as_tensor(accepted)

        def plan(cache: StateCache) -> StatePlan:
            run, width = cache.page_tokens, (longest - 2) // cache.page_tokens + 2
            pages = state_pages(self.store.tables[cache.group], there, first, advanced, run, width)
            return StatePlan(offsets, advanced, first, *pages, run, tiles)

        self.model.advance_states(int(lengths.sum()), StepStates(self.store.state_caches, plan).get)
        self.store.host_pool.record_writes()  # these pages may be swapped out once the samples are known

"""Which tests `make test` leaves to `make test-full`. All others are in the gate, but for those marked `soak` or `gpu`.

The longest prefix of a test's node id below counts. The number says how many cases of each test function the gate
runs, always the same ones; 0 leaves the whole test out. A test is left out for one of four reasons:

- It is about measuring, reproducing or comparing: bench, reproduce, tools, other projects' clients.
- It asks another part of a grid for what one part already shows: the gate keeps at least one case.
- It needs a cluster, a browser, or a compiler for another machine than this one.
- It shows in one long run what short tests show piece by piece."""

from __future__ import annotations

GATE_CASES = {
    # Measuring, reproducing, comparing.
    "tests/bench/": 0,
    "tests/papers/": 0,
    "tests/papers/test_rows.py": 1,
    "tests/clients/": 0,
    "tests/test_compare_": 0,
    "tests/test_transcripts.py": 0,
    "tests/memory/test_reserved.py::test_bench_throughput_runs": 0,
    "tests/server/test_console.py::test_looks_take_a_small_share_of_the_time": 0,
    # A cluster, a browser, a compiler for another machine.
    "tests/distributed/test_ray.py": 0,
    "tests/server/test_console_browser.py": 0,
    "tests/server/test_fronts.py::test_every_combination": 2,
    "tests/kernels/test_compiles.py": 0,
    "tests/kernels/test_shapes.py": 0,
    "tests/kernels/cpu/test_build.py::test_sources_give_no_warnings": 0,
    "tests/test_packaging.py::test_wheels_hold_what_could_be_built": 0,
    # Kernels: a case of each kernel in the interpreter, several on the CPU; whole steps of a model are in the grid.
    "tests/kernels/": 12,
    "tests/kernels/test_attention.py::test_backends_equal_dense_attention": 40,
    "tests/kernels/cpu/": 8,
    "tests/kernels/cpu/test_native_attention.py::test_nothing_outside_of_a_sequence_is_touched": 1,
    "tests/kernels/triton/": 1,
    "tests/kernels/triton/test_paged_attention.py::test_decode_equals": 3,
    "tests/kernels/triton/test_paged_attention.py::test_prompts_equal": 4,
    "tests/kernels/triton/test_rope_write.py::test_rotation_and_writes": 5,
    "tests/kernels/triton/test_mixed_steps.py": 0,
    "tests/kernels/triton/test_owners.py": 0,
    "tests/kernels/triton/test_stage_graphs.py": 0,
    "tests/kernels/triton/test_state_steps.py": 0,
    "tests/kernels/triton/test_vendor_backend.py": 0,
    "tests/kernels/triton/test_reduce.py::test_an_exchange_buffer": 0,
    "tests/kernels/triton/test_sampling.py::test_ties_and_edges_equal_the_definition": 0,
    "tests/kernels/triton/test_state_kernels.py::test_rows_in_parts": 0,
    "tests/kernels/cpu/test_library.py::test_processes_end_cleanly": 1,
    "tests/worker/": 12,
    "tests/worker/virtual/test_virtual_memfd.py::test_a_process_may_end_with_live_tensors": 1,
    "tests/weights/test_loading.py::test_a_start_takes_little_more_memory_than_its_weights": 0,
    "tests/weights/": 10,
    # Equality with transformers and with one rank: a few cases of each grid.
    "tests/test_beams.py": 2,
    "tests/test_embeddings.py": 3,
    "tests/test_equality.py": 1,
    "tests/test_equality.py::test_chunks_page_sizes_scopes_and_backends": 3,
    "tests/test_rounded_kv.py::test_perplexity_of_the_bundled_model": 2,
    "tests/test_gpu_ranks.py": 0,
    "tests/test_layer_kinds.py": 2,
    "tests/test_mllama_logits.py": 2,
    "tests/test_pipeline.py": 2,
    "tests/test_pool.py": 1,
    "tests/test_rank_grid.py": 2,
    "tests/test_seeing_logits.py": 2,
    "tests/test_sleep.py": 1,
    "tests/test_state_logits.py": 2,
    "tests/test_structured.py::test_ranks": 0,
    "tests/test_tapes.py": 2,
    "tests/test_tensor_parallel.py": 1,
    "tests/test_unlike_logits.py": 1,
    "tests/test_virtual_memory.py": 3,
    "tests/models/test_shards.py": 8,
    "tests/weights/test_grouped_shards.py": 1,
    # Speculation: a few cases of each grid.
    "tests/test_served_heads.py": 2,
    "tests/test_speculative_decoding.py": 1,
    "tests/test_state_speculation.py": 2,
    "tests/test_draft_pair.py": 3,
    "tests/conformance/test_drafts.py": 4,
    "tests/core/test_speculation.py::test_drafts_follow_grammars": 4,
    "tests/core/test_speculation.py::test_running_states": 2,
    "tests/core/test_speculation.py::test_tokens_are_those_of_single_steps": 4,
    "tests/worker/test_draft_tokens.py": 3,
    "tests/conformance/test_traces.py::test_random_traces": 14,
    "tests/planting/test_planted_service.py::test_planted_bug_is_found": 18,
    # One long run of what short tests show.
    "tests/test_draft_pair.py::test_sampled_tokens_have_the_models_distribution": 0,
    "tests/test_draft_prompts.py": 0,
    "tests/server/test_openapi.py::test_schemathesis_finds_nothing": 0,
    "tests/test_virtual_cycles.py": 0,
    "tests/test_assets.py::test_held_out_loss_is_below_the_n_grams": 0,
    "tests/test_assets.py::test_it_answers_four_of_five_chat_questions": 0,
    "tests/conformance/test_largest.py": 0,
    "tests/conformance/test_liveness.py": 3,
    "tests/test_embeddings.py::test_an_engine_elsewhere": 0,
    "tests/test_tiny_vision.py::test_without_a_picture_it_asks_for_one": 0,
    "tests/test_sleep.py::test_other_weights_come_again_too": 0,
    "tests/server/test_ending.py::test_whoever_ends_the_engine_is_named": 2,
    "tests/server/test_ending.py::test_a_route_that_exits_ends_the_process_with_1": 1,
    "tests/server/test_fronts.py::test_all_fronts_drain": 0,
    "tests/conformance/test_traces.py::test_traces_over_stages": 2,
    "tests/conformance/test_traces.py::test_traces_swap_recompute": 5,
    "tests/ipc/test_host.py::test_stops": 1,
    "tests/server/test_process.py::test_bad_server_flags": 2,
    "tests/test_structured_batches.py": 0,
    "tests/test_page_plans.py": 30,
    "tests/test_cli_vllm.py": 24,
    "tests/memory/test_reserved.py": 30,
    "tests/test_tiny_vision.py::test_held_out_pictures_are_answered_right": 0,
    "tests/server/test_fronts.py::test_without_a_part_the_server_ends": 1,
    "tests/server/test_structured_http.py::test_what_explodes_disturbs_nobody": 1,
    "tests/distributed/test_served_ranks.py": 1,
    "tests/conformance/test_stored.py": 8,
    "tests/text/images/": 8,
}


def gate_cases(nodeid: str) -> int | None:
    """Return how many cases of a test's function the gate runs; None stands for all of them."""
    rules = [prefix for prefix in GATE_CASES if nodeid.startswith(prefix)]
    return GATE_CASES[max(rules, key=len)] if rules else None


def left_out(path: str) -> bool:
    """Return True if the gate runs nothing of a file or folder, which need not be imported then."""
    return any(path.startswith(prefix) and not cases for prefix, cases in GATE_CASES.items() if "::" not in prefix)

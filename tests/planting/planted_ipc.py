"""Bugs planted in src/quire/ipc and src/quire/distributed: between frontends and the engine, and among ranks."""

from __future__ import annotations

from bugs import Bug, bug

BUGS: dict[str, Bug] = {
    # Between fronts and an engine's process
    "a frame that engines never send is read as an answer": bug(
        "ipc/frames.py",
        "if frame.kind != REPLY:",
        "if frame.kind < REPLY:",
        "tests/ipc/test_frames.py::test_kinds_that_no_engine_sends_are_refused[16]",
        r"DID NOT RAISE .*WireError",
    ),
    "an engine that sleeps is read as one that is awake": bug(
        "ipc/frames.py",
        'float(data["seconds"]), mapped, ranks, asleep\n',
        'float(data["seconds"]), mapped, ranks\n',
        "tests/ipc/test_frames.py::test_the_first_frames",
        r"where False = facts_equal\(EngineMetrics\(.*asleep=0\), EngineMetrics\(.*asleep=2\)\)",
    ),
    "the engine's last turn is always now": bug(
        "ipc/handshake.py",
        "return Health(True, bool(stalled), now - lasted,",
        "return Health(True, bool(stalled), now,",
        "tests/ipc/test_frames.py::test_the_first_frames",
        r"beat=20\.0.* == .*beat=14\.0",
    ),
    "a connection that no event loop listened to stays open": bug(
        "ipc/process_client.py",
        "remove_reader(self._connection.fileno())\n        self._connection.close()",
        "remove_reader(self._connection.fileno())\n            self._connection.close()",
        "tests/ipc/test_engine_process.py::test_a_program_that_ends_at_start_is_named",
        r"unclosed <socket",
    ),
    "an engine's process is killed without time to end": bug(
        "ipc/process_client.py",
        "return self.child.wait_or_kill(timeout)",
        "return self.child.wait_or_kill(0.0)",
        "tests/ipc/test_engine_process.py::test_closing_ends_the_process_at_once",
        r"where False = close\(\)",
    ),
    "an engine's process ends without a word when building it exits": bug(
        "ipc/engine_server.py",
        "except BaseException as error:  # a library may end the thread too, by SystemExit",
        "except Exception as error:",
        "tests/ipc/test_engine_process.py::test_what_nobody_foresaw_at_start_is_named"
        "[SystemExit(3)-SystemExit: 3. What it wrote]",
        r"the engine's process ended with status 3 at start",
    ),
    "outputs overtake those that wait for a front that lags": bug(
        "ipc/engine_server.py",
        "if isinstance(message, StepOutputs) and (self._output_buffer or self.channel.queued_bytes > LAG_BYTES):",
        "if isinstance(message, StepOutputs) and self.channel.queued_bytes > LAG_BYTES:",
        "tests/ipc/test_backlog.py::test_what_waits_is_not_overtaken",
        r"assert \[6, 5\] == \[5, 6\]",
    ),
    "a branch keeps its place among merged outputs": bug(
        "ipc/output_buffer.py",
        "merged = branches.pop(output.branch, None)",
        "merged = branches.get(output.branch)",
        "tests/ipc/test_backlog.py::test_outputs_of_a_branch_become_one",
        r"assert \[\(1, BranchOutput\(request_id='', branch=0, tokens=\(5, 8, 9\).* == \[\(1, "
        r"BranchOutput\(request_id='', branch=1,",
    ),
    "an abort of several requests overtakes the one that waits for a grammar": bug(
        "ipc/grammar_queue.py",
        "numbers is not None and not self._waiting_requests.keys().isdisjoint(\n                numbers\n            "
        "):",
        "numbers is not None and self._waiting_requests.keys() >= {*numbers}:",
        "tests/ipc/test_lane.py::test_an_abort_waits_for_its_request[message2-now2]",
        r"AbortRequests\(numbers=\(7, 1, 2\)\)\] == .*AbortRequests\(numbers=\(7, 2\)\)\]",
    ),
    "a request whose grammar is there waits for another grammar": bug(
        "ipc/grammar_queue.py",
        "return (None, message) if grammar is None else (_with_grammar(message, grammar), None)",
        "return (None, message) if grammar is None or self._messages else (_with_grammar(message, grammar), None)",
        "tests/ipc/test_lane.py::test_a_grammar_that_is_made_holds_up_none_that_is_there",
        r"assert \[\] == \[2\]",
    ),
    "requests of a front that left run on": bug(
        "ipc/engine_loop.py",
        "self._abort(client_index, AbortRequests(None))",
        "self._abort(client_index, AbortRequests(()))",
        "tests/ipc/test_host.py::test_a_front_that_leaves_ends_its_requests",
        r"\{'length': 4\} == \{'abort': 2, 'length': 2\}",
    ),
    "pictures that just fit are refused": bug(
        "ipc/pixel_store.py",
        "if self.total_bytes + size > self.max_bytes:",
        "if self.total_bytes + size >= self.max_bytes:",
        "tests/ipc/test_host.py::test_pixels_are_bounded_and_all_of_the_room_can_be_used",
        r"Overloaded: the images of requests under way have 12 bytes; with the 12 of this request they exceed 24",
    ),
    "ids of requests that died with an engine stay in use": bug(
        "ipc/engine_client.py",
        "streams, self._streams_by_number, self._streams_by_id = list(self._streams_by_number.values()), {}, {}",
        "streams, self._streams_by_number = list(self._streams_by_number.values()), {}",
        "tests/ipc/test_engine_process.py::test_an_engine_in_a_dead_ones_place_knows_none_of_its_ids",
        r"InputError: request id 'mine' is in use",
    ),
    # Between an engine and its ranks
    "a rank beyond the last is accepted": bug(
        "distributed/rank_messages.py",
        "return 0 <= rank < ranks and",
        "return 0 <= rank <= ranks and",
        "tests/distributed/test_parallel_frames.py::test_parts_that_there_can_not_be_are_refused[(4, 4, 0, 1)]",
        r"DID NOT RAISE .*WireError",
    ),
    "a rank's loss is told as a failure of the rank that noticed it": bug(
        "distributed/rank_worker.py",
        '[:300], "", isinstance(error, PeerLost))',
        '[:300], "")',
        "tests/distributed/test_rank_failures.py::test_the_cause_is_named_and_not_its_echoes",
        r"rank [01] failed: PeerLost: connection closed by peer in step 3",
    ),
    "what ranks applied is not compared": bug(
        "distributed/remote_runner.py",
        "if reply[:2] != replies[first][:2] or",
        "if reply.step != replies[first].step or",
        "tests/distributed/test_remote.py::test_a_rank_that_applied_something_else_is_named",
        r"DID NOT RAISE .*EngineDead",
    ),
    "graphs that one rank alone captures are not noticed": bug(
        "distributed/remote_runner.py",
        "for kind in graphs.keys() | captured[0].keys():",
        "for kind in graphs.keys() & captured[0].keys():",
        "tests/distributed/test_remote.py::test_a_rank_that_captures_none_where_others_do_is_named",
        r"failed: AssertionError: no rank may begin at start",
    ),
    "a rank is given up before its time": bug(
        "distributed/remote_runner.py",
        "came = self._poll.poll(seconds * 1000)",
        "came = self._poll.poll(seconds)",
        "tests/distributed/test_rank_failures.py::test_a_rank_that_is_slow_has_all_of_its_time",
        r"rank \d has not answered for \d+ s (in step 1|at start) \(--rank-timeout\)",
    ),
    "a rank that waits for another stage is blamed": bug(
        "distributed/rendezvous.py",
        "return min(at_work or every,",
        "return min(every,",
        "tests/distributed/test_pipes.py::test_a_rank_that_waits_for_another_stage_is_not_the_one_behind",
        r"where 0 = slowest\(",
    ),
    "what is to be added is lost between stages": bug(
        "distributed/stage_pipes.py",
        "return both[0], both[1] if more else None",
        "return both[0], both[0] if more else None",
        "tests/distributed/test_pipes.py::test_a_stage_receives_what_the_one_before_sent",
        r"assert \[\[\[1\.0, 2\.0\]\], \[\[1\.0, 2\.0\]\], \[\[3\.0, 4\.0\]\], None\] == ",
    ),
    "a record is written over one that a reader has not read": bug(
        "distributed/shared_ring.py",
        "if self._read_position + memory.capacity < self._write_position + size:",
        "if self._read_position + memory.capacity < self._write_position:",
        "tests/distributed/test_ring.py::test_each_reader_reads_all_of_it",
        r"EngineDead: ring overrun: record",
    ),
    "ranks are added up from the last to the first": bug(
        "distributed/shared_memory_exchange.py",
        "for other in every[1:]:",
        "for other in every[1:].flip(0):",
        "tests/distributed/test_shared_exchange.py::test_sums_are_taken_in_rank_order_in_fp32[dtype0]",
        r"assert False\nE .*where False = .*equal",
    ),
    "a rank's share of threads is rounded up": bug(
        "distributed/rank_startup.py",
        "return max(threads // ranks, 1)",
        "return max(-(-threads // ranks), 1)",
        "tests/distributed/test_starting.py::test_each_rank_has_its_part_and_its_share_of_threads",
        r"\('/folder', None, 3\) == \('/folder', None, 2\)",
    ),
    "a link to another folder is taken for a folder of this user's": bug(
        "distributed/triton_cache.py",
        "found = folder.lstat()",
        "found = folder.stat()",
        "tests/distributed/test_caches.py::test_a_folder_that_others_can_write_is_left_alone[link]",
        r"\{'TRITON_CACHE_DIR': .* == \{\}",
    ),
    "a rank gets all of the engine's environment": bug(
        "distributed/ray_fd_server.py",
        '"environment": {**environment},',
        '"environment": {**os.environ, **environment},',
        "tests/distributed/test_ray_door.py::test_a_rank_has_what_it_would_inherit",
        r"assert 'HOME' not in",
    ),
    "a cluster that strangers listen for too is used": bug(
        "distributed/ray_address.py",
        "listening_users(int(port)) == {os.getuid()})",
        "os.getuid() in listening_users(int(port)))",
        "tests/distributed/test_ray_door.py::test_an_address_where_strangers_listen_too",
        r"DID NOT RAISE .*StartupError",
    ),
    "the GPU with the most room decides": bug(
        "distributed/rank_devices.py",
        "rank = min(range(len(rooms))",
        "rank = max(range(len(rooms))",
        "tests/distributed/test_neighbours.py::test_a_gpu_that_has_filled_up_is_named_as_ranks_are_started_anew",
        r"DID NOT RAISE .*StartupError",
    ),
    "versions of Ray are compared as text": bug(
        "distributed/ray_driver.py",
        r"""if tuple(map(int, re.findall(r"\d+", ray.__version__)[:2])) < MIN_RAY_VERSION:""",
        """if ray.__version__ < ".".join(map(str, MIN_RAY_VERSION)):""",
        "tests/distributed/test_ray_door.py::test_a_ray_that_is_old_or_listens_to_all_is_refused",
        r"DID NOT RAISE .*StartupError",
    ),
}

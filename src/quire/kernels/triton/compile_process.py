"""Compile kernels in processes of their own, into Triton's cache on disk.

Threads compile in parallel only in part: Python translates a kernel to Triton's first intermediate form under the
interpreter's lock, and the rest shares one address space. Processes share neither. One process, the server, imports the
kernels while the model is loaded, and forks workers at the first request. A worker compiles many kernels, one at a
time, because a process for each kernel would take 0.06 s of a processor more; a small kernel takes 0.2 s. The server
can fork safely, since it has a single thread and does not use the GPU.

A request is a packet of JSON, [number, *arguments of _compile], which one of the workers takes. Its answer is a line:
the number, and 1 if the kernel was compiled, else 0. Number 0 requests a launcher and has no answer. A kernel that
could not be compiled there is compiled by the process that needs it, which then raises the error. If a worker dies, the
server and all workers end.

This module imports neither torch nor Triton, so that the server can be started before they are imported.
"""

from __future__ import annotations

import ctypes
import gc
import json
import logging
import os
import pkgutil
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from hashlib import sha256
from importlib import import_module
from typing import Any, NoReturn

VERSIONS = ("3.6", "3.7")
"""Versions of Triton whose `serialize_specialization_data`, `preload` and cache keys are those that are used here."""
PACKAGE = "quire.kernels.triton"
ANSWER_SECONDS = 180.0  # the longest wait for an answer, the server's imports and earlier requests included
END_SECONDS = 0.5  # the longest wait for the server to end by itself
PROGRAM = f"from {__name__} import main; main()"
STDIN, STDOUT, STDERR = 0, 1, 2
MAX_REQUEST_BYTES = 2**20  # of a packet; the rest of a longer one would be lost
PR_SET_PDEATHSIG = 1  # of <linux/prctl.h>
log = logging.getLogger("quire.startup")


class KernelCompiler:
    """The client of a server, which compiles up to `processes` kernels at a time. The server starts when this object is
    made, and ends at `close` or with this process. Thread-safe.

    If the server cannot be started or is lost, `compile` returns False."""

    def __init__(self, processes: int) -> None:
        folders = (folder for folder in sys.path if folder and isinstance(folder, str))  # Python skips others
        variables = {"PYTHONPATH": os.pathsep.join(folders), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        self._lock = threading.Lock()
        self._waiting: dict[int, Future[bool]] = {}  # by the number of the request
        self._launchers: list[Sequence[str]] = []  # argument types of the launchers that were requested
        self.num_requests = 0
        self._requests: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        with suppress(OSError):
            self._requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self._requests.settimeout(ANSWER_SECONDS)
            with theirs:
                # Errors are not shown: the same kernel fails here again, with its error.
                self._process = subprocess.Popen(
                    [sys.executable, "-P", "-c", PROGRAM, str(processes)], env=os.environ | variables, bufsize=0,
                    stdin=theirs.fileno(), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                )  # fmt: skip
            threading.Thread(
                target=self._read_answers, args=(self._process,), name="quire-compiler", daemon=True
            ).start()

    def compile(
        self, kernel: Any, key: str, signature: Any, device: int, constexprs: Any, options: Any, attrs: Any,
        warmup: bool,
    ) -> bool:  # fmt: skip
        """Compile `kernel`, unless the cache on disk has it. Wait until it is there, and return True; return False if
        the server could not compile it. The arguments are those of JITFunction._do_compile."""
        import triton
        from triton.runtime import jit

        version = ".".join(triton.__version__.split(".")[:2])
        if self._process is None or version not in VERSIONS:
            return False
        try:
            _, _, target, backend, _ = kernel.device_caches[device]
            if _is_on_disk(kernel.ASTSource(kernel, signature, constexprs, attrs), backend, options):
                return True
            more, launcher_types = ((), list(signature.values())) if version == "3.6" else ((target,), [])
            specialization = jit.serialize_specialization_data(
                jit.get_full_name(kernel.fn), signature, constexprs, attrs, options, key, *more
            )
        except Exception:  # a constant that JSON cannot hold, or a difference of this release of Triton
            return False
        name = kernel.fn.__name__
        return self.request(kernel.module, name, specialization, list(vars(target).values()), launcher_types)

    def request(
        self, module: str, name: str, specialization: str, target: list[Any], launcher_types: Sequence[str] = ()
    ) -> bool:
        """Compile the kernel `name` of `module` for a `target` (the arguments of GPUTarget). Wait for the answer, and
        return True if it was compiled. `launcher_types` are the types of its arguments, if Triton compiles a launcher
        for them; the answer does not wait for that."""
        answer = Future[bool]()
        with self._lock:
            if self._process is None or self._requests is None:
                return False
            self.num_requests += 1
            self._waiting[self.num_requests] = answer
            requests: list[list[Any]] = [[self.num_requests, module, name, specialization, target]]
            if launcher_types and launcher_types not in self._launchers:  # this is the first kernel that needs it
                self._launchers.append(launcher_types)
                requests.insert(0, [0, launcher_types])
            try:
                for request in requests:
                    self._requests.send(json.dumps(request).encode())
            except OSError:  # the server is lost, or the workers read nothing
                self._process.kill()
                return False
        try:
            return answer.result(ANSWER_SECONDS)
        except TimeoutError:
            log.warning("%s is not compiled after %.0f s: the engine compiles its kernels itself", name, ANSWER_SECONDS)
            self.close()
            return False

    def close(self) -> None:
        """End the server. Requests that wait for an answer return False."""
        with self._lock:
            process, self._process = self._process, None
            if self._requests is not None:
                self._requests.close()
        if process is not None:
            if self.num_requests:  # it may have workers, which it ends and waits for
                with suppress(subprocess.TimeoutExpired):
                    process.wait(END_SECONDS)
            process.kill()
            process.wait()

    def _read_answers(self, process: subprocess.Popen[bytes]) -> None:
        """Pass answers on until the server ends. Requests that then still wait get False."""
        with process:  # which closes the pipes and waits for the end of the process
            assert process.stdout is not None, "a pipe"
            for line in process.stdout:
                with suppress(ValueError, KeyError), self._lock:  # what a sitecustomize prints is no answer
                    number, compiled = map(int, line.split())
                    self._waiting.pop(number).set_result(bool(compiled))
            with self._lock:
                self._process = None
                for answer in self._waiting.values():
                    answer.set_result(False)
                self._waiting.clear()


def hash_triton() -> threading.Thread:
    """Import Triton, and return a thread that computes the digest of its files, 400 MB, mostly without the
    interpreter's lock. The digest is a part of all keys of Triton's cache. Triton keeps it."""
    from triton.runtime.cache import triton_key

    thread = threading.Thread(target=triton_key, name="quire-triton-key", daemon=True)
    thread.start()
    return thread


_compiler: KernelCompiler | None = None  # of this process
_compiler_lock = threading.Lock()


def start_compiler(processes: int) -> None:
    """Start this process's KernelCompiler, unless it runs."""
    global _compiler
    with _compiler_lock:
        _compiler = _compiler or KernelCompiler(processes)


def running_compiler() -> KernelCompiler | None:
    """Return this process's KernelCompiler, if it runs."""
    return _compiler


def stop_compiler() -> None:
    """End this process's KernelCompiler, if it runs."""
    global _compiler
    with _compiler_lock:
        compiler, _compiler = _compiler, None
    if compiler is not None:
        compiler.close()


def _is_on_disk(source: Any, backend: Any, options: Any) -> bool:
    """Return True if Triton's cache on disk has this kernel."""
    from triton.compiler import compiler

    key = compiler.get_cache_key(source, backend, options, compiler.get_cache_invalidating_env_vars())
    folder = compiler.get_cache_manager(sha256(key.encode()).hexdigest())
    return f"{source.name[:150]}.json" in (folder.get_group(f"{source.name[:150]}.json") or ())


class TargetDriver:
    """The part of a Triton driver that compilation needs: it has a target, and no device."""

    def __init__(self, target: Any) -> None:
        self.target = target

    def get_current_target(self) -> Any:
        """Return the GPU that kernels are compiled for."""
        return self.target

    def get_current_device(self) -> int:
        """Return the number of a device, as Triton needs one."""
        return 0


def find_kernel(module: str, name: str) -> Any:
    """Return the kernel `name` of a module of PACKAGE. Raise ValueError if there is none."""
    from triton.runtime.jit import JITFunction

    if not module.startswith(f"{PACKAGE}."):
        raise ValueError(f"{module} is not a module of {PACKAGE}")
    kernel = vars(import_module(module)).get(name)
    kernel = kernel if isinstance(kernel, JITFunction) else getattr(kernel, "kernel", None)  # of a FastLauncher
    if not isinstance(kernel, JITFunction):
        raise ValueError(f"{module} has no kernel {name}")
    return kernel


def fix_cache_key(function: Any) -> None:
    """Compute the part of Triton's cache keys that belongs to `function`, a kernel or a function that kernels call.

    Triton's result depends on whether the keys of called functions were computed earlier. Processes that compile
    kernels in different orders would then not find each other's. Here they are always computed earlier."""
    from triton.runtime.jit import JITCallable

    for name in function.fn.__code__.co_names if function.hash is None else ():
        called = function.__globals__.get(name)
        if isinstance(called, JITCallable) and called is not function:
            fix_cache_key(called)
    _ = function.cache_key  # the property computes it


def _compile(module: str, name: str, specialization: str, target: list[Any]) -> None:
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    driver.set_active(TargetDriver(GPUTarget(*target)))
    kernel = find_kernel(module, name)
    fix_cache_key(kernel)
    kernel.preload(specialization)


def _build_launcher(types: list[str]) -> None:
    """Compile the C module with which Triton 3.6 launches kernels that have arguments of these types."""
    from triton.backends.nvidia import driver
    from triton.runtime.build import compile_module_from_src

    source = driver.make_launcher({}, dict(enumerate(types)), None)
    compile_module_from_src(source, "__triton_launcher", driver.library_dirs(), driver.include_dirs, driver.libraries)


def _work(request_fd: int, answer_fd: int) -> NoReturn:
    """Carry out requests, one at a time, until the client closes the socket. End also if the server ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    try:
        while request := os.read(request_fd, MAX_REQUEST_BYTES):
            number, *arguments = json.loads(request)
            compiled = 0
            with suppress(Exception):
                _compile(*arguments) if number else _build_launcher(*arguments)
                compiled = 1
            if number:
                os.write(answer_fd, b"%d %d\n" % (number, compiled))
    finally:
        os._exit(0)


def serve(num_workers: int, request_fd: int, answer_fd: int) -> NoReturn:
    """Fork workers at the first request. Once a worker ends, end the others: there are no more requests, or it died."""
    select.select([request_fd], [], [])  # most starts have no request, since all kernels are on disk
    workers = set[int]()
    for _ in range(num_workers):
        worker = os.fork()
        if worker == 0:
            _work(request_fd, answer_fd)
        workers.add(worker)
    workers.discard(os.wait()[0])
    for worker in workers:
        os.kill(worker, signal.SIGKILL)
    with suppress(ChildProcessError):  # there are no more
        while True:
            os.wait()  # else they would stay as zombies if the process 1 of a container does not wait for them
    os._exit(0)


def main() -> None:
    """Run the server. The program's argument is the number of processes that compile at a time."""
    # A terminal or a service manager sends these to all processes; this one ends when its input does.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    request_fd, answer_fd = os.dup(STDIN), os.dup(STDOUT)
    os.dup2(STDERR, STDOUT)  # so that output of compilers does not get among the answers
    os.dup2(STDERR, STDIN)  # so that compilers do not read requests
    gc.disable()
    hashing = hash_triton()
    with suppress(Exception):  # the imports of kernels then fail too
        import_module("torch")  # while the files are hashed
    hashing.join()
    package = import_module(PACKAGE)
    for module in pkgutil.iter_modules(package.__path__, f"{PACKAGE}."):
        with suppress(Exception):  # a module may need another GPU or version
            import_module(module.name)
    gc.freeze()
    serve(int(sys.argv[1]), request_fd, answer_fd)

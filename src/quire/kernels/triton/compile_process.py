"""Compile kernels in processes of their own, into Triton's cache on disk.

Threads compile side by side only in part: Python translates a kernel to Triton's first form under the interpreter's
lock, and what runs without the lock shares one address space. Processes share neither. One process, the server, imports
the kernels while the model is loaded, and forks a process for each kernel: it has a single thread, and does not use the
GPU. Requests are JSON, one a line; an answer is the request's number and 1 if the kernel was compiled, else 0. A kernel
that could not be compiled there is compiled where it is needed, which then raises the error.

This module imports neither torch nor Triton, so that the server can be started before they are imported.
"""

from __future__ import annotations

import gc
import json
import os
import pkgutil
import select
import selectors
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from hashlib import sha256
from importlib import import_module
from typing import Any, NoReturn

VERSIONS = ("3.6", "3.7")
"""Versions of Triton whose `serialize_specialization_data`, `preload` and keys of the cache are those used here."""
PACKAGE = "quire.kernels.triton"
ANSWER_SECONDS = 60.0  # for one kernel, the imports of the server included
PROGRAM = f"from {__name__} import main; main()"
STDIN, STDOUT = 0, 1


class KernelCompiler:
    """The server, with up to `processes` kernels at a time. It starts with this object, and ends with `close` or with
    this process. Thread-safe."""

    def __init__(self, processes: int) -> None:
        folders = (folder for folder in sys.path if folder and isinstance(folder, str))  # Python skips others
        variables = {"PYTHONPATH": os.pathsep.join(folders), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        self._lock = threading.Lock()
        self._waiting: dict[int, Future[bool]] = {}  # by the number of the request
        self.num_requests = 0
        self._process: subprocess.Popen[bytes] | None = None
        with suppress(OSError):
            self._process = subprocess.Popen(  # what fails there fails here again, and is reported here
                [sys.executable, "-P", "-c", PROGRAM, str(processes)], env=os.environ | variables, bufsize=0,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            )  # fmt: skip
            threading.Thread(
                target=self._read_answers, args=(self._process,), name="quire-compiler", daemon=True
            ).start()

    def compile(
        self, kernel: Any, key: str, signature: Any, device: int, constexprs: Any, options: Any, attrs: Any,
        warmup: bool,
    ) -> bool:  # fmt: skip
        """Compile `kernel`, unless it is on disk, and wait for that. Return False if it could not be compiled. The
        arguments are those of JITFunction._do_compile."""
        import triton
        from triton.runtime import jit

        version = ".".join(triton.__version__.split(".")[:2])
        if self._process is None or version not in VERSIONS:
            return False
        try:
            _, _, target, backend, _ = kernel.device_caches[device]
            if _is_on_disk(kernel.ASTSource(kernel, signature, constexprs, attrs), backend, options):
                return True
            newer, launched = ((), list(signature.values())) if version == "3.6" else ((target,), [])
            specialization = jit.serialize_specialization_data(
                jit.get_full_name(kernel.fn), signature, constexprs, attrs, options, key, *newer
            )
        except Exception:  # a constant that isn't JSON, or whatever differs in this release
            return False
        return self.request(kernel.module, kernel.fn.__name__, specialization, list(vars(target).values()), launched)

    def request(
        self, module: str, name: str, specialization: str, target: list[Any], launched: Sequence[str] = ()
    ) -> bool:
        """Compile the kernel `name` of `module` for a `target` (the arguments of GPUTarget), and wait for that. Return
        False if it could not be compiled. `launched` are the types of its arguments if Triton compiles a launcher for
        them, which is not waited for."""
        answer = Future[bool]()
        with self._lock:
            process = self._process
            if process is None or process.stdin is None:
                return False
            self.num_requests += 1
            self._waiting[self.num_requests] = answer
            request = [self.num_requests, launched, module, name, specialization, target]
            line = json.dumps(request).encode() + b"\n"
            pipe = select.poll()
            pipe.register(process.stdin, select.POLLOUT)
            try:
                while line:
                    if not pipe.poll(1000 * ANSWER_SECONDS):  # the process stands still
                        process.kill()
                        return False
                    line = line[process.stdin.write(line[: select.PIPE_BUF]) :]
            except OSError:
                return False
        try:
            return answer.result(ANSWER_SECONDS)
        except TimeoutError:
            self.close()
            return False

    def close(self) -> None:
        """End the server. Kernels that it has not compiled yet are refused."""
        with self._lock:
            process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()

    def _read_answers(self, process: subprocess.Popen[bytes]) -> None:
        with process:  # close the pipes, and wait for its end
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
    """Import Triton, and return a thread that computes the digest of its files, a part of all keys in its cache: 400
    MB, mostly without the interpreter's lock. Triton keeps it."""
    from triton.runtime.cache import triton_key

    thread = threading.Thread(target=triton_key, name="quire-triton-key", daemon=True)
    thread.start()
    return thread


_compiler: KernelCompiler | None = None  # of this process


def start_compiler(processes: int) -> None:
    """Start this process's KernelCompiler, unless it runs."""
    global _compiler
    _compiler = _compiler or KernelCompiler(processes)


def running_compiler() -> KernelCompiler | None:
    """Return this process's KernelCompiler, if it runs."""
    return _compiler


def stop_compiler() -> None:
    """End this process's KernelCompiler, if it runs."""
    global _compiler
    if _compiler is not None:
        _compiler.close()
        _compiler = None


def _is_on_disk(source: Any, backend: Any, options: Any) -> bool:
    """Return True if Triton's cache on disk has this kernel."""
    from triton.compiler import compiler

    key = compiler.get_cache_key(source, backend, options, compiler.get_cache_invalidating_env_vars())
    folder = compiler.get_cache_manager(sha256(key.encode()).hexdigest())
    return f"{source.name[:150]}.json" in (folder.get_group(f"{source.name[:150]}.json") or ())


class TargetDriver:
    """As much of a driver of Triton as compiling needs: it has a target, and no device."""

    def __init__(self, target: Any) -> None:
        self.target = target

    def get_current_target(self) -> Any:
        """Return the GPU that kernels are compiled for."""
        return self.target

    def get_current_device(self) -> int:
        """Return a number."""
        return 0


def find_kernel(module: str, name: str) -> Any:
    """Return the kernel `name` of a module of quire. Raise ValueError if there is none."""
    from triton.runtime.jit import JITFunction

    if not module.startswith(f"{PACKAGE}."):
        raise ValueError(f"{module} is not a module of {PACKAGE}")
    kernel = vars(import_module(module)).get(name)
    kernel = kernel if isinstance(kernel, JITFunction) else getattr(kernel, "kernel", None)  # of a FastLauncher
    if not isinstance(kernel, JITFunction):
        raise ValueError(f"{module} has no kernel {name}")
    return kernel


def fix_cache_key(function: Any) -> None:
    """Compute the part of Triton's keys that belongs to a kernel or a function that kernels call. It depends on whether
    the keys of the functions that it calls were computed before, so that processes that compile kernels in another
    order would not find each other's. Here they are always computed before."""
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
    """Compile the C module through which Triton 3.6 launches kernels with arguments of these types."""
    from triton.backends.nvidia import driver
    from triton.runtime.build import compile_module_from_src

    source = driver.make_launcher({}, dict(enumerate(types)), None)
    compile_module_from_src(source, "__triton_launcher", driver.library_dirs(), driver.include_dirs, driver.libraries)


def _run_child(answer: int, work: Callable[..., None], *arguments: Any) -> NoReturn:
    """Do the work of a forked process, and end it. `answer` is a pipe for the result."""
    try:
        work(*arguments)
        os.write(answer, b"1")
    finally:
        os._exit(0)


class Server:
    """Answers the requests in standard input on `answers` until its end, up to `most` at a time."""

    def __init__(self, most: int, answers: int) -> None:
        self.most, self.answers = most, answers
        self.selector = selectors.DefaultSelector()
        self.selector.register(STDIN, selectors.EVENT_READ)
        self.requests: deque[bytes] = deque()
        self.children: dict[int, tuple[int, int]] = {}  # by the pipe of the result: process, number of the request or 0
        self.launchers: list[list[str]] = []  # the types of their arguments

    def run(self) -> None:
        """Serve until standard input ends."""
        rest = b""
        while True:
            for key, _ in self.selector.select():
                if key.fd != STDIN:
                    self._end(key.fd)
                elif data := os.read(STDIN, 1 << 16):
                    *lines, rest = (rest + data).split(b"\n")
                    self.requests += lines
                else:
                    return
            while self.requests and len(self.children) < self.most:
                self._begin(self.requests.popleft())

    def _begin(self, request: bytes) -> None:
        """Start a request's process, and before it that of the launcher, unless there was one."""
        number, launched, *arguments = json.loads(request)
        if launched and launched not in self.launchers:
            self.launchers.append(launched)
            self._fork(0, _build_launcher, launched)
        self._fork(number, _compile, *arguments)

    def _fork(self, number: int, work: Callable[..., None], *arguments: Any) -> None:
        """Start a process. Its end of the pipe is closed when it ends, however it ends."""
        result, answer = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(self.answers)
            _run_child(answer, work, *arguments)
        os.close(answer)
        self.children[result] = pid, number
        self.selector.register(result, selectors.EVENT_READ)

    def _end(self, result: int) -> None:
        """Send the answer of a process that has ended."""
        pid, number = self.children.pop(result)
        compiled = os.read(result, 1) or b"0"
        self.selector.unregister(result)
        os.close(result)
        os.waitpid(pid, 0)
        if number:
            os.write(self.answers, b"%d %s\n" % (number, compiled))


def main() -> None:
    """Run the server. The argument is how many kernels it compiles at a time."""
    # A terminal or a service manager sends these to all processes; this one ends with its input.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    answers = os.dup(STDOUT)
    os.dup2(2, STDOUT)  # what compilers print is no answer
    gc.disable()
    hash_triton().join()
    package = import_module(PACKAGE)
    for module in pkgutil.iter_modules(package.__path__, f"{PACKAGE}."):
        with suppress(Exception):  # one of other GPUs
            import_module(module.name)
    gc.freeze()
    Server(int(sys.argv[1]), answers).run()

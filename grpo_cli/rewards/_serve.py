"""The program's side of a verdict on code. Runs inside a sandbox, where the program may do with it what it likes: nothing here decides."""

import _socket
import marshal
import os
import sys

from grpo_cli.rewards._wire import compiled, complete, confine, dump, load, mutable, receive, send

_OUTPUT_BYTES = 1 << 22
_KILL = 9


def main(job):
    """Load the program, then fork a process for every test, which answers it; the one of the test before is killed first."""
    control = confine(job)
    control.send(b"h")
    exec(_EXITS, {})
    names = {"run": _run} if job["mode"] == "stdin" else _loaded(job)
    if job["mode"] == "stdin":
        with open("main.py", "w", encoding="utf-8", errors="surrogatepass") as file:
            file.write(job["program"])
    control.send(b"r")
    child = None
    while True:
        message, extra, _, _ = control.recvmsg(1, _socket.CMSG_SPACE(4))
        if child is not None:
            try:
                os.killpg(child, _KILL)
            except OSError:  # it has left its group, or not yet made it; what else was in there dies with the sandbox
                os.kill(child, _KILL)
            os.waitpid(child, 0)
        if not message:
            os._exit(0)
        fd = int.from_bytes(extra[0][2], sys.byteorder)
        child = os.fork()
        if child == 0:
            try:
                os.setpgid(0, 0)
                os.set_inheritable(fd, False)
                control.close()
                _answer(fd, names)
            finally:
                os._exit(1)
        os.close(fd)


def _loaded(job):
    module = type(sys)("program")
    sys.modules["program"] = module
    names = vars(module)
    for text in (_program(job["prompt_code"], job["program"], job["entry_point"]), job["setup"]):
        exec(compile(text, "program", "exec"), names)
    return names


def _program(prompt, code, entry_point):
    """What to run: behind the prompt code that defines the entry point, else the body that continues it, indented or cut where need be."""
    if not prompt:
        return code
    whole = f"{complete(prompt)}\n{code}"
    if compiled(code) and entry_point in compiled(code).co_names:
        return whole
    end = next((at for at, char in enumerate(code) if at and code[at - 1] == "\n" and not char.isspace()), len(code))
    for body in (code, code[:end]):
        for text in (prompt + body, f"{prompt}    {body}", prompt + "    " + body.replace("\n", "\n    ")):
            if compiled(text):
                return text
    return whole


def _run(text):
    """Run the program as a script on this standard input; its exit status and output."""
    with open("input.txt", "w+", encoding="utf-8", newline="") as file:
        file.write(text)
    read, write = os.pipe()
    actions = [(os.POSIX_SPAWN_OPEN, 0, "input.txt", os.O_RDONLY, 0), (os.POSIX_SPAWN_DUP2, write, 1)]
    flags = sys.orig_argv[1 : sys.orig_argv.index("-c")]
    pid = os.posix_spawn(sys.executable, [sys.executable, *flags, "-c", _SCRIPT], os.environ, file_actions=actions)
    os.close(write)
    output = bytearray()
    while part := os.read(read, 1 << 16):
        output += part
        if len(output) > _OUTPUT_BYTES:
            raise ValueError("more than 4 MB of output")
    return os.waitpid(pid, 0)[1], output.decode("utf-8", "replace")


_EXITS = "import builtins, sys; builtins.exit = builtins.quit = sys.exit"
"""What -S takes away and programs use."""
_SCRIPT = f"{_EXITS}; exec(compile(open('main.py', 'rb').read(), 'main.py', 'exec'))"
_OPERATIONS = {
    "call": lambda function, *args, **kwargs: function(*args, **kwargs),
    "getattr": getattr,
    "setattr": setattr,
    "getitem": lambda value, key: value[key],
    "len": len,
    "bool": bool,
    "str": str,
    "iter": iter,
    "next": next,
}


def _answer(fd, names):
    """Do what the tests ask, in the process of one test, until they hang up."""
    objects = []

    def keep(value):
        objects.append(value)
        return b"h%x;" % (len(objects) - 1)

    def find(tag, read, until):
        if tag == b"h":
            return objects[int(until(b";"), 16)]
        if tag == b"e":
            return eval(read(), names)
        if tag == b"m":
            return type(find)(marshal.loads(read()), names)
        raise ValueError("no value")

    while True:
        request = receive(fd)
        try:
            operation, opaque, args, kwargs = load(request, find)
            value = _OPERATIONS[operation](*args, **kwargs)
            changed = mutable(args) if value is None else []  # a function that changes its arguments returns None
            send(fd, keep(value) if opaque else dump((True, value, changed), keep))
        except Exception as error:
            text = error.args[0] if error.args and isinstance(error.args[0], str) else ""
            send(fd, dump((False, type(error).__name__, text[:1000]), keep))

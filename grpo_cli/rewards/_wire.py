"""What the two processes of a verdict on code share: plain data as bytes, messages, limits. Runs inside the sandboxes.

Both start with plain `python -S`, and every import costs milliseconds of each completion: json and socket alone take longer than Python's
start. Hence the C modules and a format of our own.
"""

import _socket
import os
import resource

_MESSAGE_BYTES = 1 << 24
_RICH = {
    "builtins.range": lambda x: (x.start, x.stop, x.step),
    "collections.deque": lambda x: (list(x),),
    "fractions.Fraction": lambda x: (x.numerator, x.denominator),
    "decimal.Decimal": lambda x: (str(x),),
    "datetime.date": lambda x: (x.year, x.month, x.day),
    "datetime.datetime": lambda x: (x.year, x.month, x.day, x.hour, x.minute, x.second, x.microsecond),
    "datetime.timedelta": lambda x: (x.days, x.seconds, x.microseconds),
}
"""What else counts as plain data: the arguments that make an equal object."""
_SEQUENCES = {b"l": list, b"t": tuple, b"S": set, b"z": frozenset}


def dump(value, other):
    """Plain data as bytes, of the base type where it is a subclass; other(value) writes the rest.

    [26, "a", None] is b"l3:i1a;s1:an".
    """
    parts = []

    def sized(tag, content):
        parts.append(b"%s%d:" % (tag, len(content)))

    def write(value):
        if value is None or value is True or value is False:
            parts.append({None: b"n", True: b"T", False: b"F"}[value])
        elif isinstance(value, int):
            parts.append(b"i%x;" % int.__index__(value))
        elif isinstance(value, float):
            parts.append(b"f%s;" % float.hex(value).encode())
        elif isinstance(value, complex):
            parts.append(b"c%s;%s;" % (value.real.hex().encode(), value.imag.hex().encode()))
        elif isinstance(value, (str, bytes, bytearray)):
            content = str.encode(value, "utf-8", "surrogatepass") if isinstance(value, str) else bytes(value)
            sized(b"s" if isinstance(value, str) else b"b" if isinstance(value, bytes) else b"a", content)
            parts.append(content)
        elif isinstance(value, dict):
            sized(b"d", value)
            for key, inner in value.items():
                write(key)
                write(inner)
        elif isinstance(value, (list, tuple, set, frozenset)):
            sized(next(tag for tag, kind in _SEQUENCES.items() if isinstance(value, kind)), value)
            for inner in value:
                write(inner)
        elif (name := f"{type(value).__module__}.{type(value).__qualname__}") in _RICH:
            parts.append(b"o")
            write(name)
            write(_RICH[name](value))
        else:
            parts.append(other(value))

    write(value)
    return b"".join(parts)


def load(data, other):
    """The value that `dump` wrote; raises on anything else. other(tag, read) makes what is no plain data."""
    at = 0

    def until(stop):
        nonlocal at
        end = data.index(stop, at)
        part, at = data[at:end], end + 1
        return part

    def content():
        nonlocal at
        size = int(until(b":"))
        if not 0 <= size <= len(data) - at:
            raise ValueError("a size that does not fit")
        at += size
        return data[at - size : at]

    def read():
        nonlocal at
        tag = data[at : at + 1]
        at += 1
        if tag in (b"n", b"T", b"F"):
            return {b"n": None, b"T": True, b"F": False}[tag]
        if tag == b"i":
            return int(until(b";"), 16)
        if tag == b"f":
            return float.fromhex(until(b";").decode())
        if tag == b"c":
            return complex(float.fromhex(until(b";").decode()), float.fromhex(until(b";").decode()))
        if tag in (b"s", b"b", b"a"):
            raw = content()
            return raw.decode("utf-8", "surrogatepass") if tag == b"s" else raw if tag == b"b" else bytearray(raw)
        if tag == b"d":
            return {read(): read() for _ in range(int(until(b":")))}
        if tag in _SEQUENCES:
            return _SEQUENCES[tag](read() for _ in range(int(until(b":"))))
        if tag == b"o":
            name = read()
            if name not in _RICH:
                raise ValueError("an object that is no plain data")
            module, kind = name.split(".")
            return getattr(__import__(module), kind)(*read())
        return other(tag, read, until)

    value = read()
    if at != len(data):
        raise ValueError("more than one value")
    return value


def send(fd, message):
    if len(message) > _MESSAGE_BYTES:
        raise ValueError("a value of more than 16 MB")
    message = len(message).to_bytes(8, "big") + message
    while message:
        message = message[os.write(fd, message) :]


def receive(fd):
    def exactly(size):
        parts = []
        while size:
            part = os.read(fd, min(size, 1 << 16))
            if not part:
                raise EOFError
            parts.append(part)
            size -= len(part)
        return b"".join(parts)

    size = int.from_bytes(exactly(8), "big")
    if size > _MESSAGE_BYTES:
        raise ValueError("a message of more than 16 MB")
    return exactly(size)


def confine(job):
    for name, limit in job["limits"].items():
        hard = resource.getrlimit(getattr(resource, name))[1]
        limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(getattr(resource, name), (limit, limit))
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    os.set_inheritable(job["fd"], False)
    return _socket.socket(fileno=job["fd"])


def complete(prompt):
    """A prompt that ends in a head without a docstring gets a body, so that what stands before the head can be run."""
    return prompt if compiled(prompt) else f"{prompt}\n    pass"


def compiled(text):
    try:
        return compile(text, "program", "exec")
    except (SyntaxError, ValueError):
        return None


def mutable(args):
    return [arg for arg in args[1:] if isinstance(arg, (list, dict, set, bytearray))]

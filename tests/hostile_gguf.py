"""Hostile .gguf files: a valid one taken apart, changed, and put together again."""

import struct
from pathlib import Path

import gguf

EXTREMES = (0, 1, 3, 5, 9, 2**31, 2**32 - 1, 2**60, 2**63, 2**64 - 32, 2**64 - 1)
ALIGNMENT = 32


def text(value):
    data = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(data)) + data


def key(name, kind, layout="", *values):
    """A key of a type, with whatever is packed as its value."""
    return text(name) + struct.pack(f"<I{layout}", kind, *values)


def tensor(name, axes, kind=0, offset=0):
    return text(name) + struct.pack(f"<I{len(axes)}QIQ", len(axes), *axes, kind, offset)


class Pieces:
    """The pieces of a .gguf file: keys and tensors by name, as stored, and the tensors' bytes."""

    def __init__(self, path):
        path = Path(path)
        self.whole = path.read_bytes()
        reader = gguf.GGUFReader(path)
        fields = [field for name, field in reader.fields.items() if not name.startswith("GGUF.")]
        self.keys = {field.name: self._piece(field) for field in fields}
        self.tensors = {t.name: self._piece(t.field) for t in reader.tensors}
        self.data = self.whole[reader.data_offset :]
        self.header_size = reader.data_offset
        # Where counts, lengths, types, axes, offsets and values are, and of how many bytes.
        self.numbers = [(8, 8), (16, 8)]
        for field in [*fields, *(t.field for t in reader.tensors)]:
            at = field.offset
            for i, part in enumerate(field.parts[:8]):  # of an array, the first items
                if i != 1 and part.nbytes in (4, 8):
                    self.numbers.append((at, part.nbytes))
                at += part.nbytes

    def _piece(self, field):
        return self.whole[field.offset : field.offset + sum(part.nbytes for part in field.parts)]

    def axes(self, name, axes=None, **changes):
        """Changes a tensor's axes, type or offset."""
        field = self.tensors[name][len(text(name)) :]
        (n,) = struct.unpack_from("<I", field)
        *own, kind, offset = struct.unpack_from(f"<{n}QIQ", field, 4)
        changes = {"kind": kind, "offset": offset} | changes
        self.tensors[name] = tensor(name, own if axes is None else axes, **changes)

    def put_together(self, n_keys=None, n_tensors=None, version=3):
        keys, tensors = self.keys.values(), self.tensors.values()
        counts = (len(tensors) if n_tensors is None else n_tensors,
                  len(keys) if n_keys is None else n_keys)  # fmt: skip
        header = struct.pack("<4sIQQ", b"GGUF", version, *counts) + b"".join([*keys, *tensors])
        return header + bytes(-len(header) % ALIGNMENT) + self.data

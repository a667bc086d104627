"""The header of a .gguf file, checked against the file's size before anything uses it.

A file is "GGUF", its version, and how many tensors and keys it has; the keys (name, type, value);
the tensors (name, axes, the fastest first, type, offset); and the tensors' bytes, in the same order
and each at the next multiple of the alignment. llama.cpp reads no other files.

All keys are parsed here; `MetadataKey` in `export/gguf_model.py` lists those that a model is read
by. `gguf.GGUFReader` is not used: it needs 67 s and 610 MB for a file with 150,000 tokens (this
reader 0.6 s and 44 MB), and never ends on an array that declares 2^60 items.
"""

import math
import mmap
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type
from gguf import GGUFValueType as Kind
from numpy.typing import NDArray

from calibrate.errors import DamagedError
from calibrate.storage.strict_json import describe

_ALIGNMENT = "general.alignment"
_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_START = "<4sIQQ"
# Far beyond the largest vocabularies and models; the memory that they take is small.
_MAX_HEADER_BYTES = 1 << 26
_MAX_NAMES = 1 << 17
_MAX_ITEMS = 1 << 22
_MAX_ALIGNMENT = 1 << 16
_LONGEST_NAME = 200
_NUMBERS: dict[int, str] = {
    Kind.UINT8: "<B",
    Kind.INT8: "<b",
    Kind.UINT16: "<H",
    Kind.INT16: "<h",
    Kind.UINT32: "<I",
    Kind.INT32: "<i",
    Kind.FLOAT32: "<f",
    Kind.BOOL: "<?",
    Kind.UINT64: "<Q",
    Kind.INT64: "<q",
    Kind.FLOAT64: "<d",
}
_DTYPES = {
    Type.F16: "<f2",
    Type.F32: "<f4",
    Type.F64: "<f8",
    Type.I8: "<i1",
    Type.I16: "<i2",
    Type.I32: "<i4",
    Type.I64: "<i8",
}


class Key(NamedTuple):
    """The value of a key."""

    value: Any  # a number or bool; the bytes of a text; a description of an array, as str
    stored: bytes  # type and value, as in the file


class GgufTensor(NamedTuple):
    """A tensor in a file."""

    kind: Type
    shape: tuple[int, ...]  # in weights, the fastest axis last
    begin: int = 0  # the position of its bytes in the file

    @property
    def n_bytes(self) -> int:
        """The number of bytes; ValueError if a row is not a whole number of blocks."""
        n_weights, size = gguf.GGML_QUANT_SIZES[self.kind]
        if 0 in self.shape or self.shape[-1] % n_weights:
            raise ValueError(f"a tensor of {self.kind.name} has the axes {self.shape}")
        return math.prod(self.shape) // n_weights * size


class GgufFile(NamedTuple):
    """A .gguf file, mapped into memory."""

    keys: dict[str, Key]
    tensors: dict[str, GgufTensor]
    alignment: int
    bytes: mmap.mmap

    def data(self, name: str) -> NDArray[Any]:
        """A tensor: numbers in its shape, or of a quantised type bytes, (rows, bytes of a row)."""
        tensor = self.tensors[name]
        if dtype := _DTYPES.get(tensor.kind):
            shape = tensor.shape
        else:
            dtype, shape = "u1", gguf.quants.quant_shape_to_byte_shape(tensor.shape, tensor.kind)
        return np.frombuffer(self.bytes, dtype, math.prod(shape), tensor.begin).reshape(shape)


def read_gguf(path: Path) -> GgufFile:
    """The keys and tensors of a .gguf file.

    Raises:
      DamagedError: it is not such a file, is cut short, or declares more than it can hold.
    """
    try:
        with open(path, "rb") as file:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        return _HeaderReader(data).read_file()
    except ValueError as failure:
        raise DamagedError(
            f"{path} is not a whole .gguf file ({failure}); fetch it again"
        ) from failure


class _HeaderReader:
    """Reads numbers and texts of a header one after the other; ValueError if they are invalid."""

    def __init__(self, data: mmap.mmap):
        self.data, self.position, self.n_items = data, 0, 0
        self.end = min(len(data), _MAX_HEADER_BYTES)

    def read_file(self) -> GgufFile:
        magic, version, n_tensors, n_keys = self.read_numbers(_START)
        if magic != _MAGIC or version not in _VERSIONS:
            raise ValueError(
                f"it begins with {describe(magic.hex())} and version {version:,}, expected GGUF "
                "and 2 or 3; files for the other byte order are not read"
            )
        if max(n_tensors, n_keys) > _MAX_NAMES:
            raise ValueError(f"it declares {n_tensors:,} tensors and {n_keys:,} keys")
        keys: dict[str, Key] = {}
        for _ in range(n_keys):
            name = self.read_name(keys)
            begin, value = self.position, self.read_value(name)
            keys[name] = Key(value, self.data[begin : self.position])
        infos: dict[str, tuple[GgufTensor, int]] = {}
        for _ in range(n_tensors):
            name = self.read_name(infos)
            infos[name] = self.read_tensor(name)
        alignment = _read_alignment(keys)
        self.position = padded(self.position, alignment)
        return GgufFile(keys, self.place_tensors(infos, alignment), alignment, self.data)

    def place_tensors(
        self, infos: dict[str, tuple[GgufTensor, int]], alignment: int
    ) -> dict[str, GgufTensor]:
        """The tensors with their places in the file."""
        tensors, expected = {}, 0
        for name, (tensor, offset) in infos.items():
            if offset != expected:
                raise ValueError(f"{name} has the offset {offset:,}, expected {expected:,}")
            begin = self.position + offset
            if begin + tensor.n_bytes > len(self.data):
                raise ValueError(f"{name} goes beyond its {len(self.data):,} bytes")
            tensors[name] = tensor._replace(begin=begin)
            expected += padded(tensor.n_bytes, alignment)
        if len(self.data) > (end := self.position + expected):
            raise ValueError(f"it has {len(self.data):,} bytes, expected {end:,}")
        return tensors

    def skip(self, n_bytes: int) -> int:
        """Moves on by a number of bytes; returns the position before them."""
        begin, self.position = self.position, self.position + n_bytes
        if self.position > self.end:
            raise ValueError(f"its header does not end within {self.end:,} bytes")
        return begin

    def read_numbers(self, layout: str) -> tuple[Any, ...]:
        return struct.unpack_from(layout, self.data, self.skip(struct.calcsize(layout)))

    def read_text(self) -> bytes:
        (length,) = self.read_numbers("<Q")
        return self.data[self.skip(length) : self.position]

    def read_name(self, taken: Mapping[str, Any]) -> str:
        name = self.read_text().decode()
        if not name.isprintable() or len(name) > _LONGEST_NAME or name in taken:
            raise ValueError(f"the name {describe(name)} occurs twice, or is not plain text")
        return name

    def read_value(self, name: str) -> Any:
        (kind,) = self.read_numbers("<I")
        if kind == Kind.STRING:
            return self.read_text()
        if kind != Kind.ARRAY:
            return self.read_numbers(_number_layout(name, kind))[0]
        item_kind, count = self.read_numbers("<IQ")
        self.n_items += count
        if self.n_items > _MAX_ITEMS:
            raise ValueError(f"{name} declares an array of {count:,} items")
        if item_kind != Kind.STRING:
            self.skip(count * struct.calcsize(_number_layout(name, item_kind)))
        else:
            for _ in range(count):
                self.skip(self.read_numbers("<Q")[0])
        return f"an array of {count:,}"

    def read_tensor(self, name: str) -> tuple[GgufTensor, int]:
        """A tensor without its position, and its offset from the first tensor."""
        (n_axes,) = self.read_numbers("<I")
        if not 1 <= n_axes <= 4:
            raise ValueError(f"{name} has {n_axes:,} axes, expected 1 to 4")
        *axes, kind, offset = self.read_numbers(f"<{n_axes}QIQ")
        return GgufTensor(Type(kind), tuple(reversed(axes))), offset


def _number_layout(name: str, kind: int) -> str:
    if kind not in _NUMBERS:
        raise ValueError(f"{name} has values of type {kind:,}, expected numbers or texts")
    return _NUMBERS[kind]


def _read_alignment(keys: Mapping[str, Key]) -> int:
    alignment = keys[_ALIGNMENT].value if _ALIGNMENT in keys else gguf.GGUF_DEFAULT_ALIGNMENT
    is_in_range = type(alignment) is int and 0 < alignment <= _MAX_ALIGNMENT
    if not is_in_range or alignment & (alignment - 1):
        raise ValueError(f"{_ALIGNMENT} is not a power of two up to {_MAX_ALIGNMENT:,}")
    return alignment


def padded(n_bytes: int, alignment: int) -> int:
    """The next multiple of the alignment."""
    return n_bytes + -n_bytes % alignment


def packed_text(text: str) -> bytes:
    """A text as it is stored: its length and its bytes."""
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def packed_key(value: str | float, kind: Kind) -> bytes:
    """The type and value of a key as they are stored."""
    stored = packed_text(value) if isinstance(value, str) else struct.pack(_NUMBERS[kind], value)
    return struct.pack("<I", kind) + stored


def packed_header(
    keys: Mapping[str, bytes], tensors: Mapping[str, GgufTensor], alignment: int
) -> bytes:
    """The header of a file with stored keys, and tensors that follow one after the other."""
    parts = [struct.pack(_START, _MAGIC, _VERSIONS[-1], len(tensors), len(keys))]
    parts += [packed_text(name) + stored for name, stored in keys.items()]
    offset = 0
    for name, (kind, shape, _) in tensors.items():
        axes = struct.pack(f"<I{len(shape)}QIQ", len(shape), *reversed(shape), kind, offset)
        parts.append(packed_text(name) + axes)
        offset += padded(tensors[name].n_bytes, alignment)
    header = b"".join(parts)
    return header.ljust(padded(len(header), alignment), b"\0")

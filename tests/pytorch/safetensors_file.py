"""Reads and writes safetensors files with nothing but PyTorch.

A file is: 8 bytes, the header's length (little endian); the header, JSON that
names each tensor with its dtype, shape and byte range; the data.
"""

import ctypes
import json
import struct

import torch

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "I64": torch.int64,
    "I32": torch.int32,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


def load(path):
    """Returns ({name: tensor}, metadata); raises ValueError on a bad file."""
    with open(path, "rb") as file:
        content = bytearray(file.read())
    if len(content) < 8:
        raise ValueError(f"{path}: {len(content)} bytes; 8 hold the length")
    (length,) = struct.unpack("<Q", content[:8])
    if length > len(content) - 8:
        raise ValueError(f"{path}: a header of {length} bytes does not fit")
    header = json.loads(content[8 : 8 + length].decode("utf-8"))
    metadata = header.pop("__metadata__", {})
    data = memoryview(content)[8 + length :]
    tensors = {}
    for name, entry in header.items():
        dtype, shape = DTYPES[entry["dtype"]], entry["shape"]
        begin, end = entry["data_offsets"]
        count = 1
        for size in shape:
            count *= size
        item_bytes = torch.empty((), dtype=dtype).element_size()
        fits = 0 <= begin <= end <= len(data)
        if not fits or end - begin != count * item_bytes:
            raise ValueError(
                f"{path}: {name} {shape} does not fit {begin}..{end}"
            )
        # Copied, because the format does not align tensors to their element.
        piece = torch.empty(shape, dtype=dtype)
        if count:
            raw = torch.frombuffer(
                bytearray(data[begin:end]), dtype=torch.uint8
            )
            piece = raw.view(dtype).reshape(shape).clone()
        tensors[name] = piece
    return tensors, metadata


def save(path, tensors, metadata):
    """Writes {name: tensor} and {name: string}, the header padded to 8 bytes."""
    header, offset = {"__metadata__": metadata}, 0
    for name, tensor in tensors.items():
        size = tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + size],
        }
        offset += size
    text = json.dumps(header).encode("utf-8")
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for tensor in tensors.values():
            flat = tensor.detach().contiguous()
            size = flat.numel() * flat.element_size()
            file.write(ctypes.string_at(flat.data_ptr(), size) if size else b"")

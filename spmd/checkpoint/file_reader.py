"""Reads of byte ranges. Not mappings: their pages count as the rank's, and a fault in one kills it."""

from __future__ import annotations

import os
from contextlib import ExitStack
from io import FileIO

from torch import Tensor

from spmd.comm.errors import UserError


class FileReader:
    """Reads from files that it keeps open until `close`. `bytes_read` counts what was asked of storage."""

    def __init__(self) -> None:
        self.bytes_read = 0
        self._files: dict[str, FileIO] = {}
        self._open = ExitStack()

    def read(self, name: str, file: str, offset: int, into: Tensor) -> None:
        """Fill a contiguous uint8 tensor from `offset` on. Raises `UserError` naming the file and the tensor
        `name` when the file can't be read or ends too early."""
        view = into.view(-1).numpy().data
        done = 0
        try:
            stream = self._file(file)
            stream.seek(offset)
            while done < len(view):
                count = stream.readinto(view[done:])
                if not count:
                    size = os.fstat(stream.fileno()).st_size
                    raise UserError(
                        f"{file} is truncated: tensor {name} needs bytes up to {offset + len(view)}, the "
                        f"file has {size}; download or copy it again"
                    )
                done += count
        except OSError as error:
            raise UserError(
                f"{file} can't be read (tensor {name}): {error.strerror or error}; check the "
                f"file and its disk, or download it again"
            ) from error
        self.bytes_read += done

    def expect(self, file: str, offset: int, size: int) -> None:
        """Let the system fetch a range that is to be read soon."""
        if hasattr(os, "posix_fadvise"):
            try:
                os.posix_fadvise(self._file(file).fileno(), offset, size, os.POSIX_FADV_WILLNEED)
            except OSError:
                return  # `read` says what is wrong

    def close(self) -> None:
        self._open.close()
        self._files.clear()

    def _file(self, file: str) -> FileIO:
        if file not in self._files:
            self._files[file] = self._open.enter_context(FileIO(file))
        return self._files[file]

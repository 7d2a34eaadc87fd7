"""Metadata that survives damage to one copy: every metadata file exists twice, `lohan.NAME.0` and `lohan.NAME.1`.

The twins are written one after the other, each made durable before the next is touched. So a crash can
leave at most one of them damaged or behind, and two damaged copies of the same page mean decay, not a crash:
then we stop instead of guessing. Each file has a fixed number of places; page `sequence` goes to place
`sequence % places`. With two places (the manifest) the page before the newest stays whole while the newest is
written.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from lohan.errors import StoreCorrupt, UnknownFormat
from lohan.store.files import Files
from lohan.store.sealed import HEAD_BYTES, KIND_NAMES, Page, seal, unseal
from lohan.store.transfer import EndOfFile, describe, read_fully, write_fully


@dataclass(frozen=True, slots=True)
class Damaged:
    """A place whose bytes are not a whole page, and why."""

    reason: str


Found = Page | Damaged | None


class Twins:
    """One kind of metadata in one drive directory, in two files."""

    def __init__(self, files: Files, directory: Path, kind: int, *, place_bytes: int, places: int = 1):
        self.files, self.directory, self.kind = files, directory, kind
        self.place_bytes, self.places = place_bytes, places
        self.name = KIND_NAMES[kind]
        self.paths = tuple(directory / f"lohan.{self.name}.{copy}" for copy in (0, 1))
        self.notes: list[str] = []

    def create(self, payload: bytes) -> None:
        """Make both files with page 0 in them and all their space taken."""
        for copy, path in enumerate(self.paths):
            try:
                descriptor = self.files.open(path, write=True, create=True)
            except OSError as error:
                raise describe(error, f"creating {path.name}", self.directory) from error
            try:
                # Written, not only reserved: overwriting these bytes later needs no new space anywhere.
                write_fully(self.files, descriptor, [memoryview(bytes(self.place_bytes * self.places))], 0)
                self.files.sync(descriptor)
            except OSError as error:
                raise describe(error, f"creating {path.name}", self.directory) from error
            finally:
                self.files.close(descriptor)
            self._write(copy, 0, seal(self.kind, 0, payload))

    def write(self, sequence: int, payload: bytes) -> None:
        """Put page `sequence` into both twins, durably, first one and then the other."""
        for copy in (0, 1):
            self._write(copy, sequence % self.places, seal(self.kind, sequence, payload))

    def read(self, *, repair: bool, check: Callable[[Page], None] | None = None) -> Page:
        """The newest page. Damage that the other twin makes good is noted, and mended if `repair`."""
        found = [[self._read(copy, place, settle=repair) for place in range(self.places)] for copy in (0, 1)]
        if all(copy[place] is None for copy in found for place in range(self.places)):
            raise self._lost("is empty")
        newest: Page | None = None
        for place in range(self.places):
            pair = (found[0][place], found[1][place])
            good = max((p for p in pair if isinstance(p, Page)), key=lambda p: p.sequence, default=None)
            damaged = [p for p in pair if isinstance(p, Damaged)]
            if len(damaged) == 2:
                raise self._lost(f"is damaged in both copies ({damaged[0].reason}; {damaged[1].reason})")
            if good is not None and (newest is None or good.sequence > newest.sequence):
                newest = good
            for copy, page in enumerate(pair):
                if page == good:
                    continue
                if isinstance(page, Damaged):
                    self.notes.append(
                        f"{self.paths[copy]} is damaged ({page.reason}); its twin is whole and was used"
                        + (", and the damage is mended." if repair else ".")
                    )
                if repair:
                    mended = seal(self.kind, good.sequence, good.payload) if good else bytes(HEAD_BYTES)
                    # The whole place: a file that was missing or cut short has to get its length back.
                    self._write(copy, place, mended.ljust(self.place_bytes, b"\0"))
        if newest is None:
            raise self._lost("is damaged")
        return newest

    def _lost(self, how: str) -> StoreCorrupt:
        return StoreCorrupt(
            f"The store's {self.name} in {self.directory} {how}. Restore {self.paths[0].name} or {self.paths[1].name} "
            "from a backup, or create the store again from the model or its last export.",
            drive=str(self.directory),
        )

    def _read(self, copy: int, place: int, *, settle: bool) -> Found:
        path = self.paths[copy]
        try:
            descriptor = self.files.open(path, write=False)
        except FileNotFoundError:
            return Damaged("the file is missing")
        except OSError as error:
            raise describe(error, f"opening {path.name}", self.directory) from error
        try:
            offset = place * self.place_bytes
            if settle:
                # A killed process may have left a page that only the page cache has, or a failed sync one that never
                # will be durable. Mending its twin from that, and losing power meanwhile, would tear both copies.
                self.files.sync(descriptor)
                self.files.drop_cache(descriptor, offset, self.place_bytes)
            data = bytearray(max(0, min(self.place_bytes, self.files.size(descriptor) - offset)))
            read_fully(self.files, descriptor, [memoryview(data)], offset)
            if len(data) < self.place_bytes and not any(data):
                return Damaged(f"it is cut short: {len(data)} of {self.place_bytes} bytes")
            return unseal(self.kind, bytes(data))
        except EndOfFile:
            return Damaged("it is cut short")
        except ValueError as error:
            return Damaged(str(error))
        except UnknownFormat as error:
            raise UnknownFormat(f"{path}: {error}") from None
        except OSError as error:
            # The twin may well be readable: one failing sector is what the second copy is for.
            return Damaged(f"the drive failed to read it: {error.strerror}")
        finally:
            self.files.close(descriptor)

    def _write(self, copy: int, place: int, page: bytes) -> None:
        path = self.paths[copy]
        try:
            create = not self.files.exists(path)
            descriptor = self.files.open(path, write=True, create=create)
            try:
                write_fully(self.files, descriptor, [memoryview(page)], place * self.place_bytes)
                self.files.sync(descriptor)
            finally:
                self.files.close(descriptor)
            if create:
                self.files.sync_directory(self.directory)
        except OSError as error:
            raise describe(error, f"writing {path.name}", self.directory) from error

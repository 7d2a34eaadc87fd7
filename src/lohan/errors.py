"""Every error a user can meet, in one place: what happened, where, and what to do.

All of them are LohanError, and the command line turns each into one message and exit code 2. The message is
written for the person who has to act on it; the attributes are there for code that has to decide.
"""

from __future__ import annotations


class LohanError(Exception):
    """Something the user can mend. The message says how."""


class ConfigError(LohanError):
    """A setting that cannot work."""


class PlanInfeasible(LohanError):
    """The budgets cannot hold the run."""

    def __init__(self, message: str, *, least_bytes: int | None = None):
        super().__init__(message)
        self.least_bytes = least_bytes
        """Of host memory, that would do; None where the message speaks of something else."""


class ModelError(LohanError):
    """A model, or the folder it comes from or goes to, that cannot be used as it is."""


class DataError(LohanError):
    """Training data that cannot be used as it is. The message names the file and the line."""


class DeviceOutOfMemory(LohanError):
    """The device's memory budget cannot hold what was asked for now."""


class NonFinite(LohanError):
    """A loss or gradient is infinite or not a number, and no loss scaling can help."""

    def __init__(self, message: str, *, step: int, micro_batch: int | None, unit: str):
        super().__init__(message)
        self.step = step
        self.micro_batch = micro_batch
        self.unit = unit


class ArenaError(LohanError):
    """A lease that can never fit, or an arena that is closed."""


class StoreError(LohanError):
    """Anything the store refuses or cannot do."""


class StoreMissing(StoreError):
    """There is no (complete) store in this directory."""


class StoreExists(StoreError):
    """A store is already here and would be lost."""


class StoreLocked(StoreError):
    """Another process has the store open."""


class StoreFull(StoreError):
    """A drive has too little free space."""


class DriveMismatch(StoreError):
    """The directories given are not the drives of one store."""


class UnknownFormat(StoreError):
    """Written by a version of the format this program does not know."""


class StoreTorn(StoreError):
    """An in-place store (versions: 1) was cut off in the middle of a step."""


class RecordMissing(StoreError):
    """No such record, or nothing was ever written to it."""


class StoreIOError(StoreError):
    """The drive failed a request."""

    def __init__(self, message: str, *, drive: str, offset: int | None = None, errno: int | None = None):
        super().__init__(message)
        self.drive = drive
        self.offset = offset
        self.errno = errno


class StoreCorrupt(StoreError):
    """Bytes on the drive are not the bytes that were written."""

    def __init__(self, message: str, *, drive: str, record: str | None = None, offset: int | None = None):
        super().__init__(message)
        self.drive = drive
        self.record = record
        self.offset = offset

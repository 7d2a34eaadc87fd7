"""What tests and campaigns stand on: drives that fail on demand, and the long runs that prove what is promised.

faults     an in-memory file layer that crashes, loses power, fails, tears and forgets
machine    random operation sequences against a simple model (needs hypothesis)
kill       a writer process that is killed again and again
oracle     plain PyTorch training that says what every bit of a run must be
zoo        tiny models of every architecture that is promised
parity     a run against the oracle, and the settings that must not change a bit
late_files real files without durability, and files whose I/O lands late
paced_files real files held to a rate, as if their drive were slower
campaign   the commands: python -m lohan.testing.campaign property | kill | parity | races
"""

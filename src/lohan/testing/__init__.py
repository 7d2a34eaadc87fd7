"""What tests and campaigns stand on: drives that fail on demand, and the long runs that prove the store.

faults     an in-memory file layer that crashes, loses power, fails, tears and forgets
machine    random operation sequences against a simple model (needs hypothesis)
kill       a writer process that is killed again and again
campaign   the commands: python -m lohan.testing.campaign property | kill
"""

"""`python -m lohan`: the command, where its script is not on the path."""

from lohan.cli import main

main()

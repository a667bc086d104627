"""python -m calibrate is the command line."""

from calibrate.cli.main import main

main()

"""python -m calibrate is the command line."""

from calibrate.faces.cli import main

main()

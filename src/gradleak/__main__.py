"""`python -m gradleak` is the command `gradleak`."""

from gradleak.cli import main

if __name__ == "__main__":
    main()

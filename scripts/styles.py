"""How a rule is drawn, the same in every figure: (colour, marker, dash)."""

# Okabe and Ito's palette, and a marker and dash of its own for every rule.
STYLES = {
    "plain": ("#000000", "o", "-"),
    "paper": ("#0072B2", "s", "-"),
    "own": ("#D55E00", "^", "-"),
    "through": ("#CC79A7", "X", "--"),
    "constant": ("#CC79A7", "X", "--"),
    "layers": ("#009E73", "D", "--"),
    "log-n": ("#009E73", "D", "--"),
    "hard": ("#777777", "*", "-."),
}

"""Defaults and limits of the library and the command line, each once.

Nothing is imported here: the help of the command line loads this file, and no NumPy.
"""

# Inputs that a head draws.
MAX_SIZE = 1 << 20  # items of an input
MAX_SETS = 10_000_000  # inputs of each size; units of work are planned in memory
SIZES = "16..16384"  # items of an input, doubling from the first to the last
# Examples of a model.
LENGTHS = (256, 512, 1024)  # tokens of the built-in task, and of windows of retention text
N_EXAMPLES = 8  # of each prompt template and length
# A fitted rule; --paper is the loss "least-squares".
MIN_ENTROPY = 0.5  # nats: the paper's threshold, at and below which beta is 1
MIN_BETA, MAX_BETA = 1 / 1024, 1024.0  # bounds of beta
PAPER_MIN_BETA, PAPER_MAX_BETA = 1.0, 64.0  # bounds of beta, by least squares
MAX_STEPS = 100  # of the optimiser, for each kind of rule of a model
# Limits on harm.
NLL_TOLERANCE = 0.005  # nats of mean NLL that rows may lose at trained sizes
NLL_TOLERANCE_PER_TOKEN = 0.01  # nats per token that answers of a model may lose there
MAX_KL = 0.01  # nats per token of retention text, from the baseline's predictions

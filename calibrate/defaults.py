"""Defaults and limits that the command line shows and the library keeps to, each once.

Nothing is imported here: the help of the command line loads this, and no NumPy.
"""

MAX_SIZE = 1 << 20  # items of a set that a head draws
MAX_SETS = 10_000_000  # inputs of each size: units of work are planned ahead
SIZES = "16..16384"  # items of the sets that a head draws: doubling from the first to the last
LENGTHS = (256, 512, 1024)  # tokens of the built-in task and of windows of text
N_EXAMPLES = 8  # of each prompt template and length
MIN_ENTROPY = 0.5  # nats: the threshold of the paper, at and below which beta is 1
MIN_BETA, MAX_BETA = 1 / 1024, 1024.0  # of a fitted rule
PAPER_MIN_BETA, PAPER_MAX_BETA = 1.0, 64.0  # of a fit by least squares
NLL_TOLERANCE = 0.005  # nats of NLL, in the mean, that rows may lose in distribution
NLL_TOLERANCE_PER_TOKEN = 0.01  # nats, likewise, that the answers of a model may lose per token
MAX_KL = 0.01  # nats per token of retention text, from the baseline's predictions
MAX_STEPS = 100  # of an optimiser, for each family of a model's rules
TIMEOUT = 600.0  # seconds without a finished task

"""The temperature of a model's output distribution, while it decodes."""

from torch import Tensor
from transformers import LogitsProcessor

from calibrate.core.masking import is_masked
from calibrate.store.fit import Fit
from calibrate.store.inverse_temperature import check_fit
from calibrate.torch.softmax import entropy, inverse_temperature


class AdaptiveTemperature(LogitsProcessor):
    """Multiplies next-token logits by beta(H), with H the entropy of softmax(logits) in nats.

    The fit is one of arrays: logits over the vocabulary, and the next token of calibration text as
    target. A processor before it that sets logits to -inf takes these tokens out of H and n.

        >>> import torch, calibrate
        >>> from calibrate.transformers import AdaptiveTemperature
        >>> processor = AdaptiveTemperature(calibrate.load("paper"))
        >>> processor(torch.tensor([[5]]), torch.tensor([[2.0, 1.0, 0.0, -1.0]])).shape
        torch.Size([1, 4])

    In use: `model.generate(**inputs, do_sample=True, logits_processor=[AdaptiveTemperature(fit)])`.

    Args:
      fit: with one rule for all heads.
    Raises:
      CoefficientsError: no fit was given, or it distinguishes heads.
    Reference: Velickovic et al. 2024, section 3, for attention; gains on outputs are not measured.
    """

    def __init__(self, fit: Fit):
        self.fit = check_fit(fit)
        self.fit.only  # noqa: B018 - raises for a fit of several heads

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Logits (batch, vocabulary), sharpened; of their dtype."""
        z = scores.float()
        highest = z.amax(-1, keepdim=True)
        n = (~is_masked(z - highest)).sum(-1)
        beta = inverse_temperature(entropy(z), self.fit, n=n)
        # From the highest logit, so that no product overflows a narrow dtype.
        return (beta[..., None] * (z - highest) + highest).to(scores.dtype)

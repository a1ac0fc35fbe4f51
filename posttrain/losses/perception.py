"""What PAPO (arXiv:2507.06448) adds to a policy loss: a completion must depend on the picture, and stay decided without it.

    -gamma * clamp(k3, 0, 0.2) + eta_1 * H(p) + eta_2 * H(p_masked)

k3 estimates KL(p || p_masked) at each token, p_masked being the same policy before the same tokens with a picture that is partly
hidden. All of it has a gradient, by both passes. The bound is what keeps the divergence from being raised without end; without the
entropies it would be raised by policies that say anything.
"""

from __future__ import annotations

from torch import Tensor

from posttrain.core.batch import TokenBatch
from posttrain.core.results import LossOutput
from posttrain.losses.kl import k3
from posttrain.losses.named_options import call
from posttrain.losses.policy import POLICY_LOSSES

LARGEST_PERCEPTION = 0.2
"""Nats of divergence beyond which a token is said to depend on the picture enough."""


def perception(
    batch: TokenBatch,
    logps: tuple[Tensor, Tensor],
    entropies: tuple[Tensor, Tensor],
    shows_images: Tensor,
    options: object,
) -> LossOutput:
    """`logps` and `entropies` are (N,) of the picture and of the masked one, `shows_images` (N,) is 0 where there is no picture.

    Divided as the policy term of `options.loss_type` is: per token, per completion, per possible token.
    """
    divergence = k3(*logps)
    values = -options.perception_loss_weight * divergence.clamp(0, LARGEST_PERCEPTION)
    values = values + options.der_loss_weight1 * entropies[0] + options.der_loss_weight2 * entropies[1]
    term = call(POLICY_LOSSES[options.loss_type].normaliser, batch, values * shows_images, options=options)
    seen = shows_images > 0
    metrics = {"perception/kl": divergence.detach()[seen], "perception/masked_entropy": entropies[1].detach()[seen]}
    return LossOutput([term], metrics=metrics)

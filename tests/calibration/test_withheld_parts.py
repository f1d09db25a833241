"""``withhold`` holds for the parts of a class too: none with fewer examples leaves a client."""

import pytest
import torch

from federation import federation
from unskew.calibration.covariances import Diagonal, Full, Shared
from unskew.calibration.finisher import StatisticsRequest
from unskew.calibration.jobs import client_statistics
from unskew.core.types import Visit
from unskew.engines.blueprint import build

PARTS, LEAST = 20, 5


@pytest.mark.parametrize("form", [Full(), Diagonal(), Shared()], ids=str)
def test_no_part_of_few_examples_leaves_a_client(form):
    """Centres that a server chose near the features themselves: most parts have an example or two."""
    small = federation("fedavg", sizes=(60, 40), dtype="float32")
    side, state = build(small.blueprint, small.data), small.state()
    side.load(state.tensors, training=False)
    with torch.no_grad():
        features = side.network.encoder(side.train.batch(torch.arange(100))[0]).double()
    labels = torch.from_numpy(side.labels[:100])
    centres = torch.stack([features[labels == label].repeat(PARTS, 1)[:PARTS] for label in range(4)])
    shared = state.tensors | {"centres": centres}
    request = StatisticsRequest(form, components=PARTS)
    for client in (0, 1):
        open_, kept = (
            client_statistics(side, shared, Visit(client, 1.0), each)
            for each in (request, StatisticsRequest(form, components=PARTS, min_count=LEAST))
        )
        assert int(open_.number.min()) == 1  # what the centres reveal where nothing is withheld
        assert bool((kept.number >= LEAST).all())
        large = open_.held[open_.number >= LEAST]
        assert kept.held.tolist() == large.tolist()
        assert torch.equal(kept.number, open_.number[open_.number >= LEAST])

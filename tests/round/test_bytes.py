"""What a round says it sent, weighed against the very tensors that every visit was given and gave back."""

from dataclasses import dataclass

import pytest
import torch

from federation import federation, image_set
from unskew.core.errors import UserError
from unskew.core.types import EVERYONE, Failure
from unskew.methods import METHODS, parse_method
from unskew.round import driver

SIZES = (9, 0, 4, 1, 6)  # one client holds nothing: it is never asked and never comes
CLASSES, FEATURES = 4, 64  # of tiny-cnn on these images
MODEL = 4 * (160 + 4_640 + 8_256 + 260)  # tiny-cnn's parameters for 8×8 grey images and 4 classes, float32

COMBINED = [
    "scaffold + prototypes + fedir",
    "moon + fedvc(size=8) + scaffold",
    "fednova + prototypes + fedavgm(0.5)",
    "feddyn + moon + prototypes + fedir",
    'fedir(target="uniform") + clsnorm + fedadam',
]


@dataclass(frozen=True)
class Weighing:
    """One job at one client: what went there, what came back; None where it raised."""

    job: str
    client: int
    shared: dict
    sums: dict | None


class Scales:
    """An engine, and beside it a list of all that went through the clients' hands."""

    def __init__(self, engine) -> None:
        self._engine = engine
        self.roster, self.memory = engine.roster, engine.memory
        self.seen: list[Weighing] = []

    def visit(self, job, shared, visits, key):
        """The loop's replies, each weighed."""
        name = job.__struct_config__.tag
        for visit, reply in zip(visits, self._engine.visit(job, shared, visits, key), strict=True):
            sums = None if isinstance(reply, Failure) else {name: value.clone() for name, value in reply.sums.items()}
            self.seen.append(Weighing(name, visit.client, dict(shared), sums))
            yield reply

    def close(self):
        self._engine.close()

    def up(self) -> int:
        """Updates in the type of the tensor they change, statistics in the model's type; a few numbers: nothing."""
        heard = [s for s in self.seen if s.client != EVERYONE and s.sums is not None]
        return sum(self._size(s, name, value) for s in heard for name, value in s.sums.items())

    def down(self) -> int:
        sent = [s.shared for s in self.seen if s.client != EVERYONE]
        return sum(value.numel() * value.element_size() for shared in sent for value in shared.values())

    def _size(self, seen, name, value):
        if name.startswith("delta/"):
            return value.numel() * seen.shared[name.removeprefix("delta/")].element_size()
        return value.numel() * self.element_size if name.startswith("stat/") else 0


def rounds(method, number=2, *, per_round=3, dtype="float32", skip=False, model="tiny-cnn", sizes=SIZES):
    """Each round's metrics with the scales that stood beside it; nothing of the round's own code weighs there."""
    small = federation(method, sizes=sizes, images=image_set(sum(sizes)), model=model, dtype=dtype, batch=4, epochs=1)
    engine = Scales(small.open())
    engine.element_size = {"float32": 4, "float64": 8}[dtype]
    state, found = small.state(), []
    for _ in range(number):
        engine.seen = []
        state, row = driver.run_round(
            small.algorithm, engine, state, small.key, per_round=per_round, rounds=9, skip_failures=skip
        )
        found.append((row, engine.up(), engine.down(), engine.seen))
    engine.close()
    return found


def ups(method, **options):
    return [row.bytes_up for row, *_ in rounds(method, **options)]


def downs(method, **options):
    return [row.bytes_down for row, *_ in rounds(method, **options)]


@pytest.mark.parametrize("method", [*(name for name in METHODS if name != "rounded"), *COMBINED])  # counted as if not
def test_bytes_are_those_of_the_tensors_that_went_and_came(method):
    for row, up, down, seen in rounds(method, 3):
        assert (row.bytes_up, row.bytes_down) == (up, down)
        assert row.clients == sum(each.job == "train" for each in seen)


@pytest.mark.parametrize("method", ["moon + scaffold", "prototypes + fedir"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_counters_and_running_means_weigh_what_they_are(method, dtype):
    """BatchNorm counts its batches in int64 beside float32: 8 bytes there, 4 elsewhere."""
    for row, up, down, seen in rounds(method, model="outside_models:batch_norm", dtype=dtype):
        assert (row.bytes_up, row.bytes_down) == (up, down)
        sent = next(each.shared for each in seen if each.job == "train")
        assert sent["buffers/encoder.1.num_batches_tracked"].dtype == torch.int64
        assert sent["params/classifier.weight"].dtype == getattr(torch, dtype)


@pytest.mark.parametrize("failing", ["raises", "nan"])
@pytest.mark.parametrize("method", ["fedavg", "scaffold + prototypes + fedir", "moon + feddyn"])
def test_a_failed_visit_was_sent_to_and_not_heard_from(method, failing):
    """Client 3 holds one example, as does the last batch of client 0: two of four fail."""
    source = f"{method} + outside_methods:{failing}(1)"
    asked = 4 * CLASSES * 4 if "fedir" in method else 0
    for row, up, down, seen in rounds(source, 2, per_round=9, skip=True):
        assert [failure.client for failure in row.failures] == [0, 3]
        heard = next(each for each in seen if each.client == 2 and each.job == "train")
        share = sum(v.numel() * 4 for name, v in heard.sums.items() if name.startswith(("delta/", "stat/")))
        assert (row.bytes_up, row.bytes_down) == (up, down)
        assert row.bytes_up == 2 * share + (asked if row.round == 1 else 0)
        assert row.bytes_down == 4 * sum(value.numel() * 4 for value in heard.shared.values())


# The ratios that the documentation gives


STAYS = "fedavg moon feddyn fednova fedprox clsprox clsnorm fedavgm fedadam fedyogi fedadagrad"


@pytest.mark.parametrize(("method", "times"), [*((name, 1) for name in STAYS.split()), ("scaffold", 2)])
def test_scaffold_sends_twice_as_much_and_what_stays_with_clients_or_server_costs_nothing(method, times):
    assert ups(method, number=3) == downs(method, number=3) == [times * 3 * MODEL] * 3


def test_scaffold_does_not_double_buffers():
    """What it adds is one number for each parameter: a running mean has no control variate."""
    plain = rounds("fedavg", 1, model="outside_models:batch_norm")[0]
    more = rounds("scaffold", 1, model="outside_models:batch_norm")[0]
    parameters = sum(v.numel() for name, v in plain[3][0].shared.items() if name.startswith("params/"))
    assert more[0].bytes_up - plain[0].bytes_up == more[0].bytes_down - plain[0].bytes_down == 3 * 4 * parameters
    assert plain[0].bytes_down > 3 * 4 * parameters


def test_prototypes_send_their_features_and_which_classes_they_saw():
    """Up a mean feature for each class and whether there is one; down the same and α, from the second round on."""
    up = 3 * (MODEL + 4 * (CLASSES * FEATURES + CLASSES))
    assert ups("prototypes", number=3) == [up] * 3
    assert downs("prototypes", number=3) == [3 * MODEL, up + 3 * 4, up + 3 * 4]


def test_fedir_asks_every_client_for_its_label_counts_once():
    """Four hold something and are asked, three come: the counts of four, in the first round alone. The target goes to
    three in every round."""
    asked = 4 * CLASSES * 4
    assert ups("fedir", number=3) == [3 * MODEL + asked, 3 * MODEL, 3 * MODEL]
    assert downs("fedir", number=3) == [3 * (MODEL + CLASSES * 4)] * 3
    first, second = rounds("fedir", 2)
    assert [each.client for each in first[3] if each.job == "survey"] == [0, 2, 3, 4]
    assert all(each.shared == {} for each in first[3] if each.job == "survey")
    assert not any(each.job == "survey" for each in second[3])


def test_fedir_asks_nobody_where_the_target_is_given():
    for target in ("uniform", "0.4 0.3 0.2 0.1"):
        assert ups(f'fedir(target="{target}")') == [3 * MODEL] * 2
        assert downs(f'fedir(target="{target}")') == [3 * (MODEL + CLASSES * 4)] * 2


# The baseline


def with_centralised():
    """Every method that the baseline may be put together with."""
    for method in METHODS:
        try:
            parse_method(f"centralised + {method}")
        except UserError:
            continue
        yield method


@pytest.mark.parametrize("method", list(with_centralised()))
def test_data_in_one_place_need_no_sending(method):
    for per_round in (2, 5):
        for row, *_ in rounds(f"centralised + {method}", 2, per_round=per_round):
            assert (row.bytes_up, row.bytes_down) == (0, 0)

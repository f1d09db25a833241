"""Two rounds of every method on a linear model, worked out in numpy: the lines that give the numbers, and the numbers.

Three images of two pixels, two clients: one holds the first image, the other the rest. Everything is float64.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch

from federation import federation
from unskew.core.types import ImageSet, Split
from unskew.data.population import Partition, Population
from unskew.engines.blueprint import dataset
from unskew.round import driver

BYTES = np.array([[51, 204], [255, 0], [102, 153]], np.uint8)
LABELS = np.array([0, 1, 0])
HOLDS = [[0], [1, 2]]  # the examples of the two clients
MEAN, STD = 0.2, 0.4
W0 = np.array([[0.3, -0.2], [0.1, 0.4]])
B0 = np.array([0.05, -0.1])
LR, MOMENTUM, DECAY, EPOCHS, BATCH = 0.5, 0.9, 0.1, 2, 2  # a client takes one step an epoch


# The numpy lines


def gradient(theta, x, y):
    """Of the mean cross-entropy of softmax(x·Wᵀ + b); theta is W and b, one above the other: [C, d + 1]."""
    z = np.c_[x, np.ones(len(x))]
    scores = np.exp(z @ theta.T)
    p = scores / scores.sum(1, keepdims=True)
    return (p - np.eye(2)[y]).T @ z / len(x)


def client(theta, who, mu=0.0, uphill=lambda w, g: 0.0):
    """Two steps of SGD with momentum and weight decay, near the server's model if mu > 0.

    The gradient is taken at w + ``uphill(w, g)``, g the gradient at w.
    """
    x, y = (BYTES[HOLDS[who]] / 255 - MEAN) / STD, LABELS[HOLDS[who]]
    w, v = theta.copy(), None
    for _ in range(EPOCHS):
        near = w + uphill(w, gradient(w, x, y))
        g = gradient(near, x, y) + mu * (near - theta) + DECAY * w
        v = g if v is None else MOMENTUM * v + g
        w = w - LR * v
    return w


def two_rounds(server, mu=0.0):
    """``server(theta, mean gradient, memory)`` gives the next theta and memory."""
    theta, memory = np.c_[W0, B0], None
    for _ in range(2):
        mean = sum(len(HOLDS[k]) * (theta - client(theta, k, mu)) for k in (0, 1)) / 3
        theta, memory = server(theta, mean, memory)
    return theta


def sharpness_aware(rho):
    """FedSAM: ρ along the client's own gradient."""
    theta = np.c_[W0, B0]
    for _ in range(2):
        new = [client(theta, k, uphill=lambda w, g: rho * g / np.linalg.norm(g)) for k in (0, 1)]
        theta = sum(len(HOLDS[k]) * new[k] for k in (0, 1)) / 3
    return theta


def behind_the_server(rho):
    """FedLESAM: the first round is FedAvg's, the second one looks back along it."""
    start = np.c_[W0, B0]
    first = sum(len(HOLDS[k]) * client(start, k) for k in (0, 1)) / 3
    back = rho * (start - first) / np.linalg.norm(start - first)
    return sum(len(HOLDS[k]) * client(first, k, uphill=lambda w, g: back) for k in (0, 1)) / 3


def plain(theta, g, memory):
    return theta - g, memory


def momentum(theta, g, v):
    v = 0.9 * (0 if v is None else v) + g
    return theta - v, v


def adaptive(second, lr, beta1, tau):
    def server(theta, g, memory):
        m, v = (np.zeros_like(g), np.full_like(g, tau**2)) if memory is None else memory
        m, v = beta1 * m + (1 - beta1) * g, second(v, g**2)
        return theta - lr * m / (np.sqrt(v) + tau), (m, v)

    return server


adam = adaptive(lambda v, g2: 0.99 * v + 0.01 * g2, 0.01, 0.9, 0.001)
yogi = adaptive(lambda v, g2: v - 0.01 * g2 * np.sign(v - g2), 0.01, 0.9, 0.001)
slow_adam = adaptive(lambda v, g2: 0.9 * v + 0.1 * g2, 0.2, 0.5, 0.3)
slow_yogi = adaptive(lambda v, g2: v - 0.1 * g2 * np.sign(v - g2), 0.2, 0.5, 0.3)
adagrad = adaptive(lambda v, g2: v + g2, 0.1, 0.0, 0.001)
slow_adagrad = adaptive(lambda v, g2: v + g2, 0.01, 0.0, 0.001)


# The numbers: W and b of each class after two rounds

GOLDEN = {
    "fedavg": [
        [-0.2800861094237664, 0.733769543909203, 0.29020051882362446],
        [0.5742086094237664, -0.5867082939092031, -0.3269658313236245],
    ],
    "fedprox(mu=0.3)": [
        [-0.26080042294873707, 0.7047469991074417, 0.2834939674391363],
        [0.5600904229487371, -0.5551019991074416, -0.3209052174391363],
    ],
    "fedavgm(beta=0.9)": [
        [-0.6916680950193654, 1.4524587262807065, 0.4970761500075608],
        [0.9344905950193654, -1.3310474762807065, -0.5274289625075608],
    ],
    "fedadam(lr=0.2, beta1=0.5, beta2=0.9, tau=0.3)": [
        [0.12545921978787067, 0.06832134754905886, 0.14111910004351233],
        [0.2546410357049109, 0.12474062921747048, -0.18823987668927725],
    ],
    "fedyogi(lr=0.2, beta1=0.5, beta2=0.9, tau=0.3)": [
        [0.1311531594843634, 0.061075872603620296, 0.1413374123923821],
        [0.2494475554864215, 0.13205198826123365, -0.18821045187405255],
    ],
    "fedadam": [
        [0.27695942796372885, -0.1767804192551701, 0.07262090952325155],
        [0.12298006375656802, 0.3767718388078312, -0.12259413857906254],
    ],
    "fedyogi": [
        [0.2769925084858256, -0.1768140129136779, 0.07258828551236977],
        [0.12294706573727107, 0.37680543625114266, -0.12256154379900848],
    ],
    "fedadagrad(lr=0.1)": [
        [0.1339004624926298, -0.03533294173779858, 0.20901193942132468],
        [0.26538371956370876, 0.23510254013802337, -0.25856554240055396],
    ],
    "fedadagrad": [
        [0.28300073637063716, -0.1829992265082493, 0.06691576877738241],
        [0.11698899670303903, 0.3829967862301362, -0.11691075274519787],
    ],
    "fedprox(mu=0.3) + fedavgm(beta=0.9)": [
        [-0.6454313348958274, 1.3780836245033035, 0.4779894430716507],
        [0.8961213348958272, -1.2527386245033034, -0.5093256930716507],
    ],
    "fedsam(rho=0.5)": [
        [-0.44694398549109965, 0.9705214446161475, 0.33679653525003195],
        [0.7410664854910998, -0.8234601946161476, -0.3735618477500318],
    ],
    "fedlesam(rho=0.5)": [
        [-0.3752157140536856, 0.9063754940792353, 0.3418514158503665],
        [0.6693382140536855, -0.7593142440792353, -0.37861672835036647],
    ],
}
DERIVED = {
    "fedavg": lambda: two_rounds(plain),
    "fedprox(mu=0.3)": lambda: two_rounds(plain, mu=0.3),
    "fedavgm(beta=0.9)": lambda: two_rounds(momentum),
    "fedadam(lr=0.2, beta1=0.5, beta2=0.9, tau=0.3)": lambda: two_rounds(slow_adam),
    "fedyogi(lr=0.2, beta1=0.5, beta2=0.9, tau=0.3)": lambda: two_rounds(slow_yogi),
    "fedadam": lambda: two_rounds(adam),
    "fedyogi": lambda: two_rounds(yogi),
    "fedadagrad(lr=0.1)": lambda: two_rounds(adagrad),
    "fedadagrad": lambda: two_rounds(slow_adagrad),
    "fedprox(mu=0.3) + fedavgm(beta=0.9)": lambda: two_rounds(momentum, mu=0.3),
    "fedsam(rho=0.5)": lambda: sharpness_aware(0.5),
    "fedlesam(rho=0.5)": lambda: behind_the_server(0.5),
}


def by_hand():
    """The same federation in the package's terms."""
    split = Split(BYTES.reshape(3, 1, 1, 2), LABELS)
    images = ImageSet("by hand", ("a", "b"), split, split, (MEAN,), (STD,))
    small = federation(
        sizes=(1, 2), images=images, model="outside_models:linear", epochs=EPOCHS, batch=BATCH, lr=LR,
        momentum=MOMENTUM, weight_decay=DECAY,
    )  # fmt: skip
    who = Partition(np.array([0, 1, 1], np.int32), 2, "by hand", 0)
    return replace(small, data=dataset(images, Population.from_partition(who)))


def run(method, rounds=2):
    small = by_hand().with_method(method)
    start = {"params/classifier.weight": torch.tensor(W0), "params/classifier.bias": torch.tensor(B0)}
    state = small.run(rounds, state=driver.start(small.algorithm, start))
    return np.c_[state.tensors["params/classifier.weight"].numpy(), state.tensors["params/classifier.bias"].numpy()]


@pytest.mark.parametrize("method", DERIVED)
def test_the_pinned_numbers_are_what_the_numpy_lines_give(method):
    np.testing.assert_allclose(DERIVED[method](), GOLDEN[method], rtol=0, atol=1e-12)


@pytest.mark.parametrize("method", GOLDEN)
def test_two_rounds_give_the_pinned_numbers(method):
    np.testing.assert_allclose(run(method), GOLDEN[method], rtol=0, atol=1e-12)

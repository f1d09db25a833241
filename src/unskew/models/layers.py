"""Networks in two parts, and the names of their layers."""

from collections.abc import Iterable

from torch import Tensor, nn


class Network(nn.Module):
    """Encoder and classifier apart: ``classifier(encoder(images))``."""

    def __init__(self, encoder: nn.Module, classifier: nn.Linear) -> None:
        super().__init__()
        self.encoder = encoder
        self.classifier = classifier

    def forward(self, images: Tensor) -> Tensor:
        """[B, ch, H, W] -> [B, C]."""
        logits: Tensor = self.classifier(self.encoder(images))
        return logits

    @property
    def classifier_names(self) -> tuple[str, ...]:
        """The classifier's weight and, where it has one, its bias, as the state's tensors are named."""
        names = {id(value): f"params/{name}" for name, value in self.named_parameters()}
        own = (self.classifier.weight, self.classifier.bias)
        return tuple(names[id(value)] for value in own if value is not None)


def by_layer(names: Iterable[str]) -> dict[str, list[str]]:
    """Parameters such as ``params/encoder.fc1.weight`` grouped by their layer, ``fc1``, in the order of the network.

    A parameter that belongs to no layer, such as ``params/cls_token``, is a layer by its own name.
    """
    layers: dict[str, list[str]] = {}
    for name in names:
        plain = name.partition("/")[2]
        layers.setdefault(plain.rpartition(".")[0] or plain, []).append(name)
    short = layer_names(layers)
    return {short[layer]: parameters for layer, parameters in layers.items()}


def layer_names(modules: Iterable[str]) -> dict[str, str]:
    """Layers' names without the part of the network that they belong to, unless two would then be the same."""
    short = {name: name.removeprefix("encoder.") or name for name in modules}
    return short if len(set(short.values())) == len(short) else {name: name for name in short}

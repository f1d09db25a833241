"""How pixels become numbers, by name: as the data set's own pixels are spread, or as a pretrained network expects."""

from collections.abc import Mapping
from dataclasses import replace

from unskew.core.errors import UserError
from unskew.core.images import ImageSet

DATA = "data"
NORMALISED: Mapping[str, tuple[tuple[float, ...], tuple[float, ...]]] = {  # mean and deviation for pixels of 0..1
    "imagenet": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),  # torchvision's networks
    "lite": ((127 / 255,) * 3, (128 / 255,) * 3),  # EfficientNet-Lite's: (x − 127) / 128
}
NAMES = (DATA, *NORMALISED)


def normalised(images: ImageSet, name: str, channels: int) -> ImageSet:
    """The image set with the mean and deviation of that name, for a network that takes so many channels."""
    if name == DATA:
        mean, std = images.mean, images.std
        repeated = channels // len(mean) if len(mean) == 1 else 1
        return replace(images, mean=mean * repeated, std=std * repeated)
    mean, std = NORMALISED[name]
    if channels != len(mean):
        raise UserError(f"--normalise {name} is for colour images, these have {channels} channel; give data")
    return replace(images, mean=mean, std=std)

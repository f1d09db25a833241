"""What inference needs besides the weights, in a run directory's model.json: class names, sizes, normalization."""

from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from unskew.core.errors import UserError
from unskew.core.files import json_object, record_from
from unskew.core.types import ImageSet
from unskew.round.evaluation import Evaluation
from unskew.runs.folder import json_bytes, read_sealed

MODEL_INFO = "model.json"
MAX_SIDE = 2**16  # pixels, and classes: what a damaged file may not exceed

Shape = tuple[int, int, int]


@dataclass(frozen=True)
class ModelInfo:
    """The model's classes and inputs; pixels are normalized as (x/255 − mean) / std."""

    classes: tuple[str, ...]
    image: Shape  # [ch, H, W] of the data set's pictures
    shape: Shape  # [ch, H, W] that the network takes
    mean: tuple[float, ...]
    std: tuple[float, ...]
    class_accuracy: dict[str, list[float | None]] = field(default_factory=dict)  # by calibration ("": none) and class

    @staticmethod
    def of(images: ImageSet, shape: Shape) -> "ModelInfo":
        """The information for a network that takes ``shape``, trained on these images."""
        return ModelInfo(images.classes, images.shape, shape, images.mean, images.std)

    def with_score(self, name: str, score: Evaluation) -> "ModelInfo":
        """The information with the accuracy of each class."""
        by_class = [right / total if total else None for right, total in zip(score.right, score.total, strict=True)]
        return replace(self, class_accuracy={**self.class_accuracy, name: by_class})

    def to_bytes(self) -> bytes:
        """The content of model.json."""
        return json_bytes(asdict(self))


def read_model_info(path: Path) -> ModelInfo | None:
    """The information in a run directory; None in one written by an older version."""
    content = read_sealed(path, MODEL_INFO)
    if content is None:
        return None
    try:
        info = record_from(ModelInfo, json_object(content, path / MODEL_INFO))
        channels = info.shape[0]
        if not all(0 < side <= MAX_SIDE for side in (*info.image, *info.shape, len(info.classes))):
            raise ValueError("sizes must be positive")
        if info.image[0] not in (1, channels) or len(info.mean) != channels or len(info.std) != channels:
            raise ValueError("the channels of image, shape, mean and std do not agree")
        return info
    except ValueError as error:
        raise UserError(f"{path / MODEL_INFO} is damaged: {error}; restore it from a copy") from error

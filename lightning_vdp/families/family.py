"""How models of one type are divided, as read off their signatures and configs."""

from dataclasses import dataclass, field

from lightning_vdp.families.facts import Facts

__all__ = ["LANGUAGE_MODEL", "Family", "Modality"]


@dataclass(frozen=True)
class Modality:
    """One kind of vision input and the names under which a model knows it.

    Args:
        name: "image" or "video", as in messages.
        pixels: Forward argument with the pixels: packed patches ``[patches, ...]`` where there is a grid, else one row
            for each unit.
        grid: Forward argument with ``(time, height, width)`` in patches of each image or video, shape ``[units, 3]``,
            or without time, ``[units, 2]``; None where each row of the pixels is a unit.
        features: Method of the base model that runs the tower and the projector.
        arguments: All arguments of that method.
        counts: Forward argument with the rows of the pixels that each unit takes, where there is one.
        token: Id of the placeholder that marks the places of its features; None where there is none.
    """

    name: str
    pixels: str
    grid: str | None
    features: str
    arguments: tuple[str, ...] = ()
    counts: str | None = None
    token: int | None = None

    def carriers(self, facts: "Facts") -> list[str]:
        """Arguments that reach the features method as they are."""
        return [self.pixels] if facts.pixels_dim == 0 or self.grid is None else [self.pixels, self.grid]


@dataclass(frozen=True)
class Family:
    """How models of one type are divided.

    Args:
        modalities: Kinds of vision input in the order in which the model's forward runs them.
        facts: Record of the model type.
        tower: Child of the base model that encodes patches; None in language models and where there is no tower.
        needs_token_types: Whether positions are wrong or missing without the forward argument `mm_token_type_ids`.
        arguments: Arguments of the base model's forward.
    """

    modalities: tuple[Modality, ...] = ()
    facts: Facts = field(default_factory=Facts)
    tower: str | None = None
    needs_token_types: bool = False
    arguments: frozenset[str] = frozenset()

    @property
    def describing(self) -> frozenset[str]:
        """Arguments that say something of images and videos: sizes, counts and the like, not pixels or what marks them."""
        names = (name for modality in self.modalities for name in modality.arguments)
        return frozenset(name for name in names if "pixel" not in name)


LANGUAGE_MODEL = Family()
"""Every causal language model that keeps its layers where transformers' conventions say."""

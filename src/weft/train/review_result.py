"""Result of `weft data review`: findings, the corrected table, and the report with the images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from weft import files
from weft.inference.image_card import image_gallery
from weft.report.pages import Lead, Section, write_page
from weft.text import count, printable

TABLE = "corrected.csv"
CONTENTS = (TABLE, "report.html")
SHOWN = 40  # images in each gallery of the report
LABEL, COPY, LEAK, OUTLIER = "label", "copy with another label", "copy in train and val", "outlier"
DUPLICATE = "near-duplicate"


@dataclass(frozen=True)
class Finding:
    """An image with a problem.

    Attributes:
        path: absolute path.
        label: class name.
        proposed: class name that the image may have instead; the label itself where no other is proposed.
        probability: of the proposed class, by a classifier that was fitted without the image; None if the class has no
            other image.
        problem: `label`, `copy with another label`, `copy in train and val`, `near-duplicate`, `outlier`, or several of
            these, separated by '; '.
        action: what `corrected.csv` does: `relabel`, `exclude` or `keep`.
        split: `train` or `val`; empty if the dataset defines no split.
        group: name of the group of near-duplicates, or of the data's own group; empty without either.
    """

    path: str
    label: str
    proposed: str
    probability: float | None
    problem: str
    action: str
    split: str
    group: str

    @property
    def chance(self) -> str:
        """The probability as text; `-` without one."""
        return "-" if self.probability is None else f"{self.probability:.3f}"

    def has(self, problem: str) -> bool:
        """Return whether a problem is among those of the image."""
        return problem in self.problem.split("; ")


@dataclass(frozen=True)
class Review:
    """Result of `review`.

    Attributes:
        images: number of images.
        model: the network of the features.
        findings: images with a problem: likely label errors first, most likely first.
        judged: number of labels that could be judged.
        errors: number of likely label errors.
        confusions: (label, proposed class, images) of class pairs that are confused, most images first.
        duplicates: paths of each group of near-duplicates.
        copies_in_classes: number of those groups with several labels.
        leaks: number of those groups with images in train and val.
        needs_group: whether `corrected.csv` has groups that `--group group` must keep on one side; not where the
            dataset defines the split.
        outliers: number of outliers.
        notes: what could not be judged.
        unreadable: (path, message) of each file that cannot be read.
    """

    images: int
    model: str
    findings: list[Finding]
    judged: int
    errors: int
    confusions: list[tuple[str, str, int]]
    duplicates: list[list[str]]
    copies_in_classes: int
    leaks: int
    needs_group: bool
    outliers: int
    notes: list[str]
    unreadable: list[tuple[str, str]]

    def command(self, folder: Path) -> str:
        """Return the command that trains on the corrected table in a folder."""
        return f"weft train {folder / TABLE}{' --group group' if self.needs_group else ''}"

    def headline(self) -> str:
        """Return the conclusion as one sentence."""
        wrong = sum(row.proposed != row.label and (row.action != "keep" or row.has(LABEL)) for row in self.findings)
        if not wrong and not self.judged:
            return f"No label of {count(self.images, 'image')} could be judged."
        if not wrong:
            return f"No label of {count(self.images, 'image')} looks wrong."
        return f"{wrong:,} of {count(self.images, 'label')} ({100 * wrong / self.images:.1f} %) may be wrong."

    def lines(self) -> list[tuple[str, str]]:
        """Return (name, value) lines for the report and the terminal."""
        return [
            ("likely label errors", f"{self.errors:,}"),
            ("groups of near-duplicates", f"{len(self.duplicates):,}, {self.copies_in_classes:,} with several labels"),
            ("of these in train and val", f"{self.leaks:,}"),
            ("outliers", f"{self.outliers:,}"),
        ]

    def as_dict(self) -> dict[str, Any]:
        """Return the dictionary that `--json` prints."""
        return {
            **vars(self),
            "findings": [{**asdict(row), "path": printable(row.path)} for row in self.findings],
            "duplicates": [[printable(path) for path in group] for group in self.duplicates],
            "unreadable": [{"image": printable(path), "error": message} for path, message in self.unreadable],
        }


def write_table(path: Path, images: Sequence[Finding], *, has_split: bool) -> None:
    """Write the images with the labels that are proposed; without those to exclude."""
    rows = []
    for image in images:
        is_changed = image.action == "relabel"
        label, was = (image.proposed, image.label) if is_changed else (image.label, "")
        split = [image.split] if has_split else []
        if image.action != "exclude":
            rows.append((image.path, label, image.group, *split, was, image.problem))
    files.write_table(path, ("path", "label", "group", *(["split"] if has_split else []), "was", "problem"), rows)


def write_report(folder: Path, out: Path, data: str, result: Review) -> None:
    """Write report.html to a folder that takes the place of the directory `out`."""
    steps = [
        f"Check the images below, and edit {TABLE}: its column label has the labels that are proposed, was the former"
        " ones. Delete the rows of images that are of no class.",
        f"Train with it; your files do not change: {result.command(out)}",
    ]
    summary = [("data", data), ("images", f"{result.images:,}"), ("features", result.model), *result.lines()]
    lead = Lead([result.headline(), *result.notes], steps if result.findings else ())
    write_page(folder, f"Review of {Path(data).name or data}", lead, summary, _sections(result))


def _sections(result: Review) -> list[Section]:
    sections = []
    if wrong := [row for row in result.findings if row.has(LABEL)]:
        titles = [f"{row.label} → {row.proposed}" for row in wrong]
        text = (
            "Most likely first. Each title is the label, then the proposed class. The probability is that of a"
            " classifier that was fitted without the image."
        )
        sections.append(_gallery("Likely label errors", text, wrong, titles))
    if result.duplicates:
        finding_of = {row.path: row for row in result.findings}
        copies = [finding_of[path] for group in result.duplicates for path in group]
        titles = [f"{row.group}: {row.label}{f', {row.split}' if row.split else ''}" for row in copies]
        text = (
            "Each title is the group and the label. Copies on both sides of a split make the accuracy too high:"
            + (
                " --group group keeps them on one side."
                if result.needs_group
                else f" {TABLE} leaves out those in train."
            )
            + f" {result.copies_in_classes:,} of {count(len(result.duplicates), 'group')} have several labels,"
            f" {result.leaks:,} are in train and val."
        )
        sections.append(_gallery("Near-duplicates", text, copies, titles))
    if result.confusions:
        text = (
            "Pairs of classes that are confused, by confident learning. Many images in one pair mean an ambiguous pair."
        )
        pairs = [(label, other, f"{number:,}") for label, other, number in result.confusions[:20]]
        sections.append(Section("Ambiguous classes", text, table=(("label", "proposed class", "images"), pairs)))
    if outlying := [row for row in result.findings if row.has(OUTLIER)]:
        text = "Images whose features are far from those of all other images: not of any class, or unusual."
        sections.append(_gallery("Outliers", text, outlying, [row.label for row in outlying]))
    return sections


def _gallery(heading: str, text: str, rows: Sequence[Finding], titles: Sequence[str]) -> Section:
    """Return a section with the first images, each with its title, and a table of all."""
    images = image_gallery([row.path for row in rows[:SHOWN]], titles[:SHOWN])
    cells = [(printable(row.path), row.label, row.proposed, row.chance, row.action) for row in rows]
    header = ("image", "label", "proposed", "probability", "action")
    return Section(heading, text, html=images, table=(header, cells))

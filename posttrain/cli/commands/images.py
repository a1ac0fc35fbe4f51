"""`posttrain images check|convert|show DATA`: the images of a dataset, looked at and converted without a model."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posttrain.cli.errors import UsageError
from posttrain.cli.options.words import Parser
from posttrain.cli.running.output import no_bars, ready_to_write, writable_folder, write_json

if TYPE_CHECKING:
    from posttrain.cli.running.image_rows import ImageRows

FORMATS = ("webp", "jpeg", "png")
SHOWN_BAD = 20
MIB = 1 << 20


def parser() -> Parser:
    made = Parser(
        prog="posttrain images",
        description="The images of a dataset: a file (JSONL, JSON, Parquet, ...), a folder of such files or a Hub id. Nothing is "
        "changed in place. Exit code 0: done; 1: there are bad images; 2: the command cannot be done.",
    )
    commands = made.add_subparsers(dest="command", required=True, metavar="check|convert|show", parser_class=Parser)
    check = commands.add_parser(
        "check", help="decode every image; how many there are, of which size, and what is wrong"
    )
    check.add_argument("--json", metavar="FILE|-", help="the same as JSON; - is the screen")
    convert = commands.add_parser(
        "convert", help="write all images in one format and at most one size, and rows that name them"
    )
    convert.add_argument("--out", required=True, metavar="DIR", help="a folder for rows.jsonl and images/")
    convert.add_argument(
        "--max-pixels", type=_positive, metavar="N", help="shrink larger images to N pixels, aspect kept"
    )
    convert.add_argument("--format", choices=FORMATS, default="webp", help="of the files (default: webp)")
    convert.add_argument(
        "--quality", type=_percent, default=90, metavar="N", help="of webp and jpeg, 1 to 100 (default: 90)"
    )
    convert.add_argument("--skip-bad-rows", action="store_true", help="leave rows with a bad image out, and list them")
    show = commands.add_parser("show", help="the images of some rows as one picture")
    show.add_argument("--out", required=True, metavar="FILE", help="a PNG, JPEG or WEBP file")
    show.add_argument(
        "--rows", type=_range, default=(0, 16), metavar="A:B", help="from row A to before row B (default: 0:16)"
    )
    for each in (check, convert, show):
        each.add_argument("data", metavar="DATA")
        each.add_argument("--split", default="train", help="of a dataset that has several (default: train)")
        each.add_argument(
            "--image-root",
            metavar="DIR",
            help="folder that paths of images start from and may not leave (default: that of DATA)",
        )
        each.add_argument("--allow-image-urls", action="store_true", help="download images that rows name by URLs")
    return made


def _positive(text: str) -> int:
    if not text.isdigit() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def _percent(text: str) -> int:
    if not text.isdigit() or not 1 <= int(text) <= 100:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 to 100")
    return int(text)


def _range(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+):(\d+)", text)
    if match is None or int(match[1]) >= int(match[2]):
        raise argparse.ArgumentTypeError(f"{text!r} is not a range of rows such as 0:16")
    return int(match[1]), int(match[2])


def main(words: list[str]) -> int:
    options = parser().parse_args(words or ["--help"])
    return {"check": check, "convert": convert, "show": show}[options.command](options)


def data_of(options: Any, max_pixels: int | None = None) -> ImageRows:
    from posttrain.cli.running.datasets_of import folder_of
    from posttrain.cli.running.image_rows import ImageRows
    from posttrain.data.images.limits import DECODE, ImageLimits
    from posttrain.data.options import PrepareOptions
    from posttrain.data.sources.named import DatasetSource, SourceError, load_source
    from posttrain.data.store.building import RowSource
    from posttrain.data.store.prepare import cache_folder

    no_bars()
    try:
        rows = load_source(DatasetSource(options.data, split=options.split))
    except SourceError as error:
        raise UsageError(str(error)) from error
    downloads = cache_folder(PrepareOptions()) / "images" if options.allow_image_urls else None
    root = options.image_root or folder_of(options.data)
    urls = {"allow_urls": options.allow_image_urls, "download_folder": downloads}
    return ImageRows(RowSource(rows, None), ImageLimits(root=root, **urls, max_pixels=max_pixels, check=DECODE))


def check(options: Any) -> int:
    from posttrain.cli.running.image_rows import ImageSurvey

    if options.json:
        ready_to_write(options.json, "--json")
    data = data_of(options)
    found = ImageSurvey(rows=len(data.rows))
    for image in data.images():
        found.add(image)
    if options.json:
        write_json(options.json, found.as_json())
    if options.json != "-":
        facts = found.as_json()
        print(
            f"{facts['rows']:,} rows, {facts['rows_with_images']:,} with images: {found.images:,}, {facts['distinct']:,} distinct."
        )
        if found.pixels:
            formats = ", ".join(f"{count:,} {format}" for format, count in found.formats.most_common())
            height, width = found.largest
            print(f"{formats}; {found.num_bytes / MIB:,.1f} MiB; {facts['pixels']['median']:,} pixels in the median, the largest "
                  f"is {height} x {width} (height x width).")  # fmt: skip
        print_bad([*map(str, found.bad)], "bad images")
    return 1 if found.bad else 0


def print_bad(lines: list[str], what: str) -> None:
    if lines:
        print(f"{len(lines):,} {what}:")
    for line in lines[:SHOWN_BAD]:
        print(f"  {line}")
    if len(lines) > SHOWN_BAD:
        print(f"  ... and {len(lines) - SHOWN_BAD:,} more; --json lists all of them.")


def convert(options: Any) -> int:
    from posttrain.cli.running.image_rows import ROWS_FILE, Conversion

    folder = writable_folder(options.out, "--out")
    data = data_of(options, options.max_pixels)
    made = Conversion(data, folder, options.format.upper(), options.quality, options.skip_bad_rows)
    made.run()
    size = sum((folder / name).stat().st_size for name in made.files)
    print(f"{made.rows:,} rows with {len(made.files):,} images of {size / MIB:,.1f} MiB in {folder}.")
    print(f"Train on them with --dataset_name {folder / ROWS_FILE} --image_root {folder}")
    print_bad(made.skipped, "rows left out")
    return 1 if made.skipped else 0


def show(options: Any) -> int:
    from PIL import Image

    from posttrain.data.images.conversion import contact_sheet
    from posttrain.data.images.limits import BadImage

    ready_to_write(options.out, "--out")
    if Path(options.out).suffix.lower() not in (".png", ".jpg", ".jpeg", ".webp"):
        raise UsageError(f"--out is {options.out!r}; it takes a file that ends in .png, .jpg or .webp.")
    pictures: list[Image.Image] = []
    bad = []
    for image in data_of(options).images(*options.rows):
        if isinstance(image.source, BadImage):
            bad.append(str(image))
            continue
        pictures.append(image.source.rgb())
        print(f"{len(pictures)}: row {image.row}, {image.place}{image.source.height} x {image.source.width}")
    print_bad(bad, "bad images")
    if not pictures:
        raise UsageError(f"rows {options.rows[0]} to {options.rows[1] - 1} of {options.data} show no image.")
    contact_sheet(pictures).save(Path(options.out).expanduser())
    return 1 if bad else 0

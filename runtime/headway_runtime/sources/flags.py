"""The flags that say where a model comes from; names as in vLLM."""

import argparse

MODEL_HELP = (
    "bundled://NAME, a folder or file:///FOLDER, hf://ORG/NAME[@REVISION], s3://BUCKET/PREFIX or "
    "oci://REGISTRY/REPOSITORY[:TAG|@DIGEST]"
)


def add_source_arguments(parser: argparse.ArgumentParser) -> None:
    """Those beside the model itself."""
    add = parser.add_argument
    add("--revision", metavar="REVISION", help="branch, tag or commit of an hf:// model (default: main)")
    add(
        "--download-dir",
        metavar="FOLDER",
        help="where remote models are kept (default: the Hugging Face cache for hf://, "
        "else headway/models in the user's cache folder)",
    )

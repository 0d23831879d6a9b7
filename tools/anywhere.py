"""Write the notebooks as Colab and Kaggle open them: links on top, and one cell that installs the workbench there.

    python tools/anywhere.py FOLDER --repository https://github.com/OWNER/NAME

The committed notebooks stay free of both. The site's workflow publishes these copies as the branch `anywhere`.
Needs nothing but Python.
"""

import argparse
import json
import posixpath
import re
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

ROOT = Path(__file__).resolve().parent.parent
BRANCH = "anywhere"
LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#|/)([^)\s#]+)")
SET_UP = Path(__file__).with_name("set_up_cell.py")  # has "REQUIREMENT" in place of what pip is asked for
PICTURES = {
    "Colab": "https://colab.research.google.com/assets/colab-badge.svg",
    "Kaggle": "https://kaggle.com/static/images/open-in-kaggle.svg",
}


@dataclass(frozen=True)
class Repository:
    """The repository that publishes the workbench: it is installed from `ref`, and these copies are on `branch`."""

    address: str
    ref: str = "main"
    branch: str = BRANCH

    def __post_init__(self) -> None:
        address = self.address.removesuffix("/").removesuffix(".git")
        if not re.fullmatch(r"https://github\.com/[\w-]+/[\w.-]+", address, re.ASCII):
            raise ValueError(
                f"repository: {self.address!r} is no address of a repository on GitHub. "
                "Give it as https://github.com/OWNER/NAME."
            )
        for name in (self.ref, self.branch):
            if not re.fullmatch(r"[\w./-]+", name, re.ASCII) or name.startswith("-") or ".." in name:
                raise ValueError(f"{name!r} is no branch, tag or commit. Name one that is in the repository.")
        object.__setattr__(self, "address", address)

    @property
    def name(self) -> str:
        return self.address.removeprefix("https://github.com/")

    @property
    def requirements(self) -> list[str]:
        """The workbench, as an archive, so that no git is needed; and its extra `lessons` without JupyterLab, in whose
        place the platform stands."""
        project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        workbench = f"{project['name']} @ {self.address}/archive/{self.ref}.zip"
        extra = project["optional-dependencies"]["lessons"]
        return [workbench, *(line for line in extra if not line.startswith("jupyterlab"))]

    def addresses_of(self, notebook: str) -> dict[str, str]:
        """Return for each platform the address that opens the copy of a notebook there."""
        place = quote(f"{self.branch}/{notebook}")
        raw = f"https://raw.githubusercontent.com/{self.name}/{place}"
        return {
            "Colab": f"https://colab.research.google.com/github/{self.name}/blob/{place}",
            "Kaggle": f"https://kaggle.com/kernels/welcome?src={raw}",
        }

    def badges(self, notebook: str) -> str:
        links = []
        for platform, address in self.addresses_of(notebook).items():
            links.append(f"[![Open in {platform}]({PICTURES[platform]})]({address})")
        return " ".join(links)

    def make_links_absolute(self, text: str) -> str:
        """Make the relative links of a notebook's Markdown absolute."""
        return LINK.sub(lambda match: self.absolute(match[1]), text)

    def absolute(self, link: str) -> str:
        """Return the address of the other copy, or of the repository's file, that a relative link leads to."""
        path = posixpath.normpath(f"notebooks/{link}")
        folder, _, notebook = path.rpartition("/")
        if folder == "notebooks" and notebook.endswith(".ipynb"):
            return f"{self.address}/blob/{self.branch}/{notebook}"
        view = "raw" if path.endswith((".png", ".svg")) else "blob"
        return f"{self.address}/{view}/{self.ref}/{path}"


def copy(notebook: Path, repository: Repository) -> str:
    """Return the notebook as JSON, with its badges, its set-up and links that are true elsewhere."""
    book = json.loads(notebook.read_text(encoding="utf-8"))
    for cell in book["cells"]:
        if cell["cell_type"] == "markdown":
            cell["source"] = repository.make_links_absolute("".join(cell["source"])).splitlines(keepends=True)
    book["cells"] = [badges_cell(notebook.name, repository), set_up_cell(repository), *book["cells"]]
    return json.dumps(book, ensure_ascii=False, indent=1) + "\n"


def badges_cell(notebook: str, repository: Repository) -> dict[str, Any]:
    return {
        "cell_type": "markdown",
        "id": "anywhere-badges",
        "metadata": {"tags": ["anywhere"]},
        "source": [repository.badges(notebook)],
    }


def set_up_cell(repository: Repository) -> dict[str, Any]:
    code = SET_UP.read_text(encoding="utf-8").rstrip()
    code = code.replace('["REQUIREMENT"]', json.dumps(repository.requirements))
    return {
        "cell_type": "code",
        "id": "anywhere-set-up",
        "metadata": {"tags": ["anywhere"]},
        "execution_count": None,
        "outputs": [],
        "source": code.splitlines(keepends=True),
    }


def front_page(notebooks: list[Path], repository: Repository) -> str:
    lines = [
        "# Open a lesson anywhere",
        "",
        f"The notebooks of [{repository.name}]({repository.address}), as Colab and Kaggle open them. "
        f"Made by tools/anywhere.py of {repository.ref}; changes belong there.",
        "",
        "| notebook | |",
        "|---|---|",
    ]
    for path in notebooks:
        lines.append(f"| [{path.stem}]({path.name}) | {repository.badges(path.name)} |")
    return "\n".join(lines) + "\n"


def write(folder: Path, repository: Repository) -> None:
    """Write all copies and their front page. Raises ValueError if there is something in the folder already."""
    is_empty = folder.is_dir() and not any(folder.iterdir())
    if folder.exists() and not is_empty:
        raise ValueError(f"{folder} is there already, and not an empty folder. Name a new one, or remove it first.")
    folder.mkdir(parents=True, exist_ok=True)
    notebooks = sorted((ROOT / "notebooks").glob("*.ipynb"))
    for path in notebooks:
        (folder / path.name).write_text(copy(path, repository), encoding="utf-8")
    (folder / "README.md").write_text(front_page(notebooks, repository), encoding="utf-8")
    print(f"{len(notebooks)} notebooks in {folder}, to be pushed as the branch {repository.branch}")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Write the notebooks as Colab and Kaggle open them.")
    parser.add_argument("folder", type=Path, help="a new or an empty one")
    parser.add_argument("--repository", required=True, help="https://github.com/OWNER/NAME")
    parser.add_argument("--ref", default="main", help="the branch, tag or commit that is installed (%(default)s)")
    parser.add_argument("--branch", default=BRANCH, help="the branch that the copies will be on (%(default)s)")
    args = parser.parse_args(arguments)
    try:
        write(args.folder, Repository(args.repository, args.ref, args.branch))
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())

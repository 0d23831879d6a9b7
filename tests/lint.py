"""Rules about the repository's own files: `python tests/lint.py` prints what breaks them, and then ends with 1.

Each rule is a function that yields sentences: the file, what is wrong with it, and the cure. Nothing of the workbench
is imported, so that all of them together take a second. What the programs in `tools/` do is tested by pytest.
"""

import ast
import json
import re
import subprocess
import sys
import tomllib
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name as canonical

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tools"))

from lock import OTHER_BUILDS, entries, pins  # noqa: E402
from try_wheel import PLATFORMS, read_platform  # noqa: E402

PACKAGE, NOTEBOOKS = ROOT / "workbench", ROOT / "notebooks"
ROOMS = {
    "base", "models", "texts", "techniques", "measure", "training", "journal", "gpus", "prediction", "advise",
    "export", "fit", "lessons", "widgets",
}  # fmt: skip
FILES_BESIDE_THE_ROOMS = {
    "__init__",
    "__main__",
    "errors",
    "lesson",
    "recipe",
}

# a technique, or the command line, says what is missing
FOUND_AT_RUN_TIME = {"deepspeed"}
IMPORTED_AS = {"yaml": "pyyaml", "elftools": "pyelftools"}
# the last: a line of a page in a kernel of Jupyter's
MAY_NEED_THE_LESSONS = ("widgets/", "lesson.py", "lessons/", "base/bar.py")

ABSENT = {"papermill": "executes notebooks; Colab has none of it", "pyelftools": "new to the platform"}
BROUGHT_BY_THE_SET_UP_CELL = {  # with the reason
    "colab": ABSENT,
    "kaggle": {
        **ABSENT,
        "papermill": "Kaggle takes the newest, whichever that is",
        "huggingface-hub": "before 1.20 it cannot parse the address of a page; pip brings a newer one",
        "nbclient": "nbconvert 6.4.5, which Kaggle pins, wants one older than 0.6",
        "transformers": "5.0 calls the Trainer's seams otherwise",
        "safetensors": "what transformers 5.15 wants",
    },
}
PLATFORM_STANDS_FOR = {"jupyterlab"}
OPENS_JUPYTER = r"0\.0\.0\.0|--ip\b|--allow-root|\.token\s*=|\.password\s*=|allow_origin|disable_check_xsrf"

Faults = Iterator[str]
RULES = list[Callable[[], Faults]]()


def rule(function: Callable[[], Faults]) -> Callable[[], Faults]:
    RULES.append(function)
    return function


def text_of(name: str | Path) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def project() -> dict:
    return tomllib.loads(text_of("pyproject.toml"))["project"]


def requirements(extra: str = "") -> list[Requirement]:
    """What the wheel brings by itself, or with an extra."""
    lines = project()["optional-dependencies"][extra] if extra else project()["dependencies"]
    return [Requirement(line) for line in lines]


def difference(there: set[str], expected: set[str]) -> str:
    more, fewer = sorted(there - expected), sorted(expected - there)
    return "; ".join(
        f"{word} {', '.join(names)}" for word, names in (("too many:", more), ("missing:", fewer)) if names
    )


# ---- how the package is laid out; its layers are import-linter's ----


@rule
def rooms_are_those_of_the_plan() -> Faults:
    rooms = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    files = {path.stem for path in PACKAGE.glob("*.py")}
    for kind, there, planned in (("rooms", rooms, ROOMS), ("files", files, FILES_BESIDE_THE_ROOMS)):
        if there != planned:
            yield f"workbench/: its {kind} are not those of tests/lint.py: {difference(there, planned)}"


@rule
def public_names_occur_once() -> Faults:
    homes = defaultdict(list)
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
                homes[node.name].append(str(path.relative_to(ROOT)))
    for name, files in homes.items():
        if len(files) > 1:
            yield f"{', '.join(files)}: the public name {name} occurs {len(files)} times: give each its own"


@rule
def imports_do_not_hide_in_strings() -> Faults:
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and "__import__" in node.value:
                yield f"{path.relative_to(ROOT)}:{node.lineno}: an import hides in a string: use import_module"


# ---- what is required, pinned and locked ----


def imported_packages(path: Path) -> set[str]:
    """Names of the packages that a file imports, at its top or in its functions."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names.add(str(node.module).partition(".")[0])
    return names


@rule
def imported_packages_are_required() -> Faults:
    always, lessons = ({canonical(each.name) for each in requirements(extra)} for extra in ("", "lessons"))
    own = set(sys.stdlib_module_names) | {"workbench"} | FOUND_AT_RUN_TIME
    for path in sorted(PACKAGE.rglob("*.py")):
        optional = path.relative_to(PACKAGE).as_posix().startswith(MAY_NEED_THE_LESSONS)
        is_package = path.with_name("__init__.py").exists()  # what is none is itself on a program's path
        beside = set() if is_package else {other.stem for other in path.parent.glob("*.py")}
        names = {canonical(IMPORTED_AS.get(name, name)) for name in imported_packages(path) - own - beside}
        for name in sorted(names - always - (lessons if optional else set())):
            yield f"{path.relative_to(ROOT)}: it imports {name}: add it to the dependencies in pyproject.toml"


@rule
def dependencies_are_ranges() -> Faults:
    for requirement in requirements():
        if [part.operator for part in requirement.specifier] != [">="]:
            yield f"pyproject.toml: {requirement}: give the lowest version that works, and nothing else"


@rule
def pins_lie_in_the_ranges() -> Faults:
    pinned = dict(pin.split("==") for pin in pins(text_of("requirements.txt")))
    for extra in ("", "lessons", "quantized", "dev"):
        for requirement in requirements(extra):
            version = pinned.get(canonical(requirement.name))
            if version is None or version not in requirement.specifier:
                yield f"requirements.txt: it pins {requirement.name} {version}, outside of {requirement}: move one"


@rule
def locks_have_the_pins_and_hashes() -> Faults:
    wanted, cure = pins(text_of("requirements.txt")), "run tools/lock.py"
    texts = {name: text_of(name) for name in ("requirements.lock", "requirements-cuda.lock")}
    locked, more = (entries(text) for text in texts.values())
    if set(locked) != set(wanted):
        yield f"requirements.lock: not the pins of requirements.txt: {difference(set(locked), set(wanted))}: {cure}"
    for pin, platforms in wanted.items():
        if platforms and f"\n{pin} ; {platforms} \\\n    --hash" not in texts["requirements.lock"]:
            yield f"requirements.lock: {pin} is not locked for {platforms} alone: {cure}"
    for name, text in texts.items():
        for pin, digests in entries(text).items():
            if not re.fullmatch(r"[a-z0-9-]+==[\w.+!-]+", pin):
                yield f"{name}: {pin!r} is no pin: {cure}"
            if not digests or not all(re.fullmatch("[0-9a-f]{64}", digest) for digest in digests):
                yield f"{name}: {pin} has no hash, or one that is none: {cure}"
        if "//" in text or "index" in text.split("\n", 1)[1]:
            yield f"{name}: it names an address or an index: {cure}"
    for pin, digests in OTHER_BUILDS.items():
        if not digests < locked.get(pin, set()):
            yield f"requirements.lock: {pin} lacks the CPU build or the CUDA build: {cure}"
    for pin in more:
        if pin in locked or not pin.startswith(("nvidia-", "cuda-", "triton==")):
            yield f"requirements-cuda.lock: {pin} is no part of CUDA alone: {cure}"


@rule
def some_pins_are_for_some_systems() -> Faults:
    bound = {pin: platforms for pin, platforms in pins(text_of("requirements.txt")).items() if platforms}
    if bound != {"deepspeed==0.19.8": "sys_platform == 'linux'"}:
        yield f"requirements.txt: pins for some systems only are {bound}: if that is meant, say so in tests/lint.py"


# ---- Colab and Kaggle ----


@rule
def platforms_have_what_is_needed() -> Faults:
    for platform in PLATFORMS:
        there = read_platform(platform)
        needed = {canonical(each.name): each.specifier for each in (*requirements(), *requirements("lessons"))}
        unfit = {name for name, versions in needed.items() if name not in there or there[name] not in versions}
        brought = set(BROUGHT_BY_THE_SET_UP_CELL[platform])
        if unfit - PLATFORM_STANDS_FOR != brought:
            yield (
                f"data/platforms/{platform}.txt: what lies outside of our ranges is not what tests/lint.py has a "
                f"reason for: {difference(unfit - PLATFORM_STANDS_FOR, brought)}: change the range, or give the reason"
            )
        if "torch" in unfit:
            yield f"data/platforms/{platform}.txt: its torch lies outside of our range: lower the bound"


@rule
def lists_of_platforms_name_their_source() -> Faults:
    parts = {
        "the repository": r"github\.com/\w",
        "its commit and day": r"commit [0-9a-f]{7} of 20\d\d-\d\d-\d\d",
        "Python": r"Python 3\.\d+",
    }
    for platform in PLATFORMS:
        head = text_of(f"data/platforms/{platform}.txt").partition("\n\n")[0]
        for part, pattern in parts.items():
            if not re.search(pattern, head):
                yield f"data/platforms/{platform}.txt: its first lines do not name {part}: add it"


@rule
def committed_notebooks_have_no_set_up() -> Faults:
    for path in sorted(NOTEBOOKS.glob("*.ipynb")):
        if re.search(r"anywhere-|colab\.research", path.read_text(encoding="utf-8")):
            yield f"notebooks/{path.name}: it has the links or the cell of tools/anywhere.py: commit it without them"


@rule
def set_up_cell_has_one_word_to_fill_in() -> Faults:
    if text_of("tools/set_up_cell.py").count('["REQUIREMENT"]') != 1:
        yield 'tools/set_up_cell.py: ["REQUIREMENT"] must occur once, for tools/anywhere.py fills it in'


@rule
def devcontainer_is_made_by_make() -> Faults:
    name = ".devcontainer/devcontainer.json"
    settings = json.loads(re.sub(r"(?m)^\s*//.*$", "", text_of(name)))
    if not settings["image"].startswith("mcr.microsoft.com/devcontainers/python:3.11"):
        yield f"{name}: its image is {settings['image']}: take that of Python 3.11"
    target = settings["postCreateCommand"].removeprefix("make ")
    if f"\n{target}: " not in text_of("Makefile"):
        yield f"{name}: it runs {settings['postCreateCommand']!r}: the Makefile has no such target"
    if set(settings["customizations"]["vscode"]["extensions"]) != {"ms-python.python", "ms-toolsai.jupyter"}:
        yield f"{name}: its extensions must be Python's and Jupyter's"


# ---- what people and their tools expect beside the code ----


@rule
def version_is_the_same_everywhere() -> Faults:
    (ours,) = re.findall(r'^__version__ = "(.*)"$', text_of("workbench/__init__.py"), flags=re.MULTILINE)
    citation = yaml.safe_load(text_of("CITATION.cff"))
    version, day = re.findall(r"^## (\d\S*)(?: \((.*)\))?$", text_of("CHANGELOG.md"), flags=re.MULTILINE)[0]
    if (citation["version"], str(citation["date-released"])) != (version, day):
        yield f"CITATION.cff: {citation['version']} of {citation['date-released']}, and CHANGELOG.md {version} of {day}"
    if ours != version:
        yield f"workbench/__init__.py: version {ours}, and the newest in CHANGELOG.md is {version}: make them one"


@rule
def make_test_takes_as_long_everywhere() -> Faults:
    """A newcomer reads the time in one of four places."""
    times = {}
    for name in ("Makefile", "README.md", "CONTRIBUTING.md", "docs/install.md"):
        line = re.search(r"^(?:\| `)?(?:make )?test[:` ].*$", text_of(name), flags=re.MULTILINE)
        times[name] = re.findall(r"\d[\d to]* minutes", line[0]) if line else []
    if len({tuple(found) for found in times.values()}) != 1 or not all(times.values()):
        yield f"the time of `make test` is not the same in {times}: write one"


@rule
def forms_ask_for_the_environment() -> Faults:
    for path in sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml")):
        fields = yaml.safe_load(path.read_text(encoding="utf-8"))["body"]
        if not any("python -m workbench --version" in field["attributes"]["label"] for field in fields):
            yield f".github/ISSUE_TEMPLATE/{path.name}: add a field that asks for `python -m workbench --version`"


@rule
def every_system_and_python_is_tried() -> Faults:
    name = ".github/workflows/tests.yml"
    matrix = yaml.safe_load(text_of(name))["jobs"]["elsewhere"]["strategy"]["matrix"]
    expected = {
        "systems": ({system.partition("-")[0] for system in matrix["os"]}, {"ubuntu", "macos", "windows"}),
        "Pythons": (matrix["python"], ["3.11", "3.12", "3.13", "3.14"]),
        "libraries": ({row["libraries"] for row in matrix["include"]}, {"oldest", "newest"}),
    }
    for part, (there, wanted) in expected.items():
        if there != wanted:
            yield f"{name}: its {part} are {there}: they must be {wanted}"


@rule
def workflows_run_what_there_is() -> Faults:
    targets = set(re.findall(r"^([a-z-]+):", text_of("Makefile"), flags=re.MULTILINE))
    for path in sorted((ROOT / ".github" / "workflows").glob("*.yml")):
        text, name = path.read_text(encoding="utf-8"), f".github/workflows/{path.name}"
        for target in sorted(set(re.findall(r"\bmake ([a-z-]+)", text)) - targets):
            yield f"{name}: the Makefile has no target {target}"
        for file in re.findall(r"(?:python |run: )((?:tools|\.ci)/\S+)", text):
            if not (ROOT / file).is_file():
                yield f"{name}: there is no file {file}"


@rule
def commit_hooks_are_the_programs_of_make_lint() -> Faults:
    recipe = re.search(r"^lint:.*\n((?:\t.*\n)+)", text_of("Makefile"), flags=re.MULTILINE)
    programs = set(re.findall(r"\$\(BIN\)/(python \S+|\S+)", recipe[1] if recipe else ""))
    hooks = yaml.safe_load(text_of(".pre-commit-config.yaml"))["repos"][0]["hooks"]
    entry_points = {re.match(r"(?:\.venv/bin/)?(python \S+|\S+)", hook["entry"])[1] for hook in hooks}
    if entry_points != programs:
        yield f".pre-commit-config.yaml: not the programs of make lint: {difference(entry_points, programs)}"


@rule
def jupyter_stays_on_this_machine_with_its_token() -> Faults:
    for name in ("Makefile", "README.md", "docs/install.md", ".ci/run", "pyproject.toml"):
        for words in re.findall(OPENS_JUPYTER, text_of(name)):
            yield f"{name}: {words!r} opens Jupyter to others: take it out"
    if not (ROOT / ".git").exists():  # an archive
        return
    tracked = subprocess.run(["git", "-C", str(ROOT), "ls-files"], capture_output=True, text=True, check=True).stdout
    for name in re.findall(r"(?m)^.*(?:jupyter\w*_config|\.jupyter/|jupyter_server_config).*$", tracked):
        yield f"{name}: a configuration of Jupyter is not committed: remove it"


def main() -> int:
    faults = [fault for check in RULES for fault in check()]
    print(*faults, f"{len(RULES)} rules about the repository's files, {len(faults)} faults", sep="\n")
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main())

"""The imports of a script, and the packages that must be installed for it."""

import ast
import sys
from collections import defaultdict
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version

from workbench.export.lines import WIDTH

# For each module, the names of it that the lines of `main` may use; "" stands for the module's own name.
MODULES = {
    "csv": "",
    "gzip": "",
    "json": "",
    "torch": "",
    "datasets": "Dataset load_dataset load_from_disk",
    "functools": "partial",
    "pathlib": "Path",
    "pyarrow.parquet": "ParquetFile",
    "transformers": "AutoConfig AutoModelForCausalLM AutoTokenizer Trainer TrainingArguments default_data_collator",
    "trl": "SFTConfig SFTTrainer",
    "unittest.mock": "patch",
}
# For each text, the package that a script needs if it has that text, though it does not import it.
PACKAGES = {
    "BitsAndBytesConfig": "bitsandbytes",
    '"adamw_8bit"': "bitsandbytes",
    '"torchao.optim': "torchao",
    '"optimi"': "torch-optimi",
    '"flashoptim"': "flashoptim",
}


def imports_of(lines: str) -> set[tuple[str, str]]:
    """Return (module, name) of what the lines of `main` use; the name is "" for `import module`."""
    names = {node.id for node in ast.walk(ast.parse(lines)) if isinstance(node, ast.Name)}
    imports = set()
    for module, known_names in MODULES.items():
        if module in names:
            imports.add((module, ""))
        imports.update((module, name) for name in names.intersection(known_names.split()))
    return imports


def import_lines(imports: set[tuple[str, str]]) -> list[str]:
    """Write import lines in isort's order: the standard library first, plain imports before those of names."""
    names_of = defaultdict(list)
    for module, name in sorted(imports, key=classes_first):
        names_of[module].append(name)
    standard: list[str] = []
    others: list[str] = []
    # A module that needs both kinds has its two lines beside each other, among the plain imports.
    for module in sorted(names_of, key=lambda module: ("" not in names_of[module], module)):
        lines = standard if module.partition(".")[0] in sys.stdlib_module_names else others
        names = names_of[module]
        if "" in names:
            names.remove("")
            lines.append(f"import {module}")
        if names:
            lines.append(import_line(module, names))
    if standard:
        standard.append("")
    return standard + others


def classes_first(entry: tuple[str, str]) -> tuple[bool, str]:
    """Return a key that sorts a module's names as isort does: classes first."""
    return entry[1].islower(), entry[1]


def import_line(module: str, names: list[str]) -> str:
    """Write the import of names of a module, on a line each if one line would be too long."""
    line = f"from {module} import {', '.join(names)}"
    if len(line) <= WIDTH:
        return line
    inside = "".join(f"    {name},\n" for name in names)
    return f"from {module} import (\n{inside})"


def header(text: str) -> str:
    """Write the header of a script by PEP 723, for `uv run`: the packages that it imports, in the versions that are
    installed here."""
    packages = {"torch"}  # The Trainer needs it, whether or not the script imports it.
    # All imports are read: functions that the script contains import some packages only when they are called.
    for node in ast.walk(ast.parse(text)):
        modules = []
        if isinstance(node, ast.ImportFrom):
            modules.append(str(node.module))
        elif isinstance(node, ast.Import):
            modules += [alias.name for alias in node.names]
        packages.update(module.partition(".")[0] for module in modules)
    packages -= sys.stdlib_module_names
    for needle, package in PACKAGES.items():
        if needle in text:
            packages.add(package)
    pins = [f'#     "{pin(package)}",' for package in sorted(packages)]
    return "\n".join(["# /// script", '# requires-python = ">=3.11"', "# dependencies = [", *pins, "# ]", "# ///"])


def pin(package: str) -> str:
    """Return the requirement of a package in the version that is installed here; in any version if it is not."""
    # The extra brings what transformers' Trainer needs.
    requirement = "transformers[torch]" if package == "transformers" else package
    with suppress(PackageNotFoundError):
        requirement += f"=={version(package).partition('+')[0]}"
    return requirement

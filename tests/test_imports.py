"""What happens while the libraries are imported, and that nothing of it is noticed afterwards."""

import gc
import sys

from workbench.base.imports import import_quickly


def test_nothing_is_collected_while_a_module_is_imported_and_afterwards_as_before(tmp_path, monkeypatch):
    (tmp_path / "asks_the_collector.py").write_text("import gc\nwas_on = gc.isenabled()\n", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    module = import_quickly("asks_the_collector")
    del sys.modules["asks_the_collector"]
    assert not module.was_on
    assert gc.isenabled()

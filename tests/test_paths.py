"""Folders and files. Names that lead elsewhere: test_security.py. Full disks: tests/faults."""

from types import SimpleNamespace

from workbench.base import paths


def test_a_folder_of_temporary_files_in_memory_is_named_with_its_file_system(monkeypatch, tmp_path, subtests):
    monkeypatch.setattr(paths.tempfile, "tempdir", str(tmp_path))
    for file_system in ("tmpfs", "ramfs", "ext4"):
        with subtests.test(file_system):
            mounts = [SimpleNamespace(mountpoint="/", fstype="ext4")]
            mounts.append(SimpleNamespace(mountpoint=str(tmp_path.parent), fstype=file_system))
            monkeypatch.setattr(paths, "disk_partitions", lambda mounts=mounts, **_: mounts)
            reason = f"{tmp_path} is itself held in memory ({file_system}), so nothing would be saved"
            assert paths.no_disk().startswith("" if file_system == "ext4" else reason)
            assert bool(paths.no_disk()) is (file_system != "ext4")

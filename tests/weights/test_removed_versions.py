"""A run that ended leaves no whole models behind, and nothing else of its folder is touched."""

from agentrl.weights.disk import remove_versions


def test_whole_models_are_removed_and_adapters_and_other_files_stay(tmp_path):
    kept = ["v000003/adapter_config.json", "v2/config.json", "vocabulary/vocab.json", "notes.txt"]
    removed = [
        "v000001/model.safetensors",
        "v000002/whole/model.safetensors",
        "v000002/changes/changes.safetensors",
        ".v000004.partial/model.safetensors",
    ]
    for name in [*kept, *removed]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    remove_versions(tmp_path)
    assert sorted(
        str(file.relative_to(tmp_path)) for file in tmp_path.rglob("*") if file.is_file()
    ) == sorted(kept)
    remove_versions(tmp_path / "missing")

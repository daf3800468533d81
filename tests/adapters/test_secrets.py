"""Where the key of the store is."""

from runner.adapters.secrets import with_store_keys


def test_a_store_key_may_come_as_files(tmp_path):
    """
    Read anew by every task, so that whoever writes a new one there is heard; a key of the environment is whole.
    """
    (tmp_path / "AWS_ACCESS_KEY_ID").write_text("of a file\n")
    (tmp_path / "AWS_SESSION_TOKEN").write_text("token\n")

    assert {"AWS_ACCESS_KEY_ID": "of a file", "AWS_SESSION_TOKEN": "token"} == with_store_keys({}, tmp_path)
    assert {"AWS_ACCESS_KEY_ID": "mine"} == with_store_keys({"AWS_ACCESS_KEY_ID": "mine"}, tmp_path)

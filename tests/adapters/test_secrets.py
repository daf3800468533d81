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


def test_the_runners_own_key_comes_first_and_is_whole(tmp_path):
    """
    Beside one that training uses, of which nothing is mixed in; without it all is as before.
    """
    theirs = {"AWS_ACCESS_KEY_ID": "theirs", "AWS_SECRET_ACCESS_KEY": "s", "AWS_SESSION_TOKEN": "t", "AWS_REGION": "r"}
    own = {"VRAMFARM_AWS_ACCESS_KEY_ID": "own", "VRAMFARM_AWS_SECRET_ACCESS_KEY": "o"}

    known = with_store_keys({**theirs, **own}, tmp_path)

    assert {**own, "AWS_ACCESS_KEY_ID": "own", "AWS_SECRET_ACCESS_KEY": "o", "AWS_REGION": "r"} == known
    assert theirs == with_store_keys(theirs, tmp_path)

"""Addresses of buckets: what is opened, what is refused, and that no secret is repeated."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from ups.buckets.cached_objects import _store, list_objects, object_info
from ups.buckets.client import Bucket, BucketUrl, is_plain_key, open_bucket, parse_bucket_url, s3_options
from ups.buckets.path import BucketPath
from ups.config.identity import recipe_identity
from ups.config.recipe import resolve_data
from ups.errors import ConfigError, MissingExtraError, UpsError

SECRET = "canary-9f8e7d"


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("s3://bucket/a/b/", BucketUrl("s3", "bucket", "a/b")),
        ("s3://bucket", BucketUrl("s3", "bucket", "")),
        ("gs://my-bucket/x", BucketUrl("gs", "my-bucket", "x")),
        ("https://example.org/data/store.zarr", BucketUrl("https", "example.org", "data/store.zarr")),
        ("http://127.0.0.1:8333/x", BucketUrl("http", "127.0.0.1:8333", "x")),
        ("http://[::1]:8333/x", BucketUrl("http", "[::1]:8333", "x")),
    ],
)
def test_an_address_has_a_host_and_a_prefix(url: str, expected: BucketUrl) -> None:
    assert parse_bucket_url(url) == expected


@pytest.mark.parametrize(
    "url",
    [
        f"s3://user:{SECRET}@bucket/x",
        f"https://user:{SECRET}@example.org/x",
        f"https://user:{SECRET}/w@example.org/x",
        f"https://example.org/x?X-Amz-Signature={SECRET}",
        f"s3://bucket/x#{SECRET}",
        "http://example.org/x",
        "http://10.0.0.1/x",
        "http://127.0.0.1.example.org/x",
        "ftp://example.org/x",
        "bucket/x",
        "s3://bucket:99/x",
        "s3:///x",
        "s3://bucket/../x",
        "s3://bucket/a//b",
        "https://[broken/x",
    ],
)
def test_an_address_that_is_not_usable_is_refused_without_its_secret(url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        open_bucket(url)
    assert SECRET not in caught.value.one_line()
    assert caught.value.hint


def test_every_kind_of_address_is_opened_without_asking_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("obstore")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    for url in ("s3://bucket/a/b", "gs://bucket/a/b", "https://example.org/a/b", "http://127.0.0.1:1/a/b"):
        opened = open_bucket(url)
        assert isinstance(opened, Bucket)
        assert opened.prefix == "a/b"
        assert opened.key("name") == "a/b/name"
        assert SECRET not in repr(opened)


def test_without_obstore_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore.store", None)
    monkeypatch.setitem(sys.modules, "obstore", None)
    calls = (open_bucket, object_info, list_objects, lambda url: BucketPath(url).is_file())
    for call in calls:
        _store.cache_clear()  # of a test before
        with pytest.raises(MissingExtraError, match="obstore") as caught:
            call("s3://bucket/x")
        assert "pip install '.[buckets]'" in caught.value.hint


@pytest.mark.parametrize("name", ["AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"])
def test_an_endpoint_is_taken_and_plain_http_only_on_this_machine(name: str) -> None:
    assert s3_options({name: "http://127.0.0.1:9000/"})["endpoint"] == "http://127.0.0.1:9000"
    assert s3_options({name: "https://minio.example.org"})["endpoint"] == "https://minio.example.org"
    for wrong in ("http://minio.example.org", f"https://me:{SECRET}@minio.example.org", "minio:9000"):
        with pytest.raises(UpsError) as caught:
            s3_options({name: wrong, "AWS_ALLOW_HTTP": "true"})
        assert SECRET not in caught.value.one_line()


def test_credentials_come_from_the_files_of_the_provider(tmp_path: Path) -> None:
    shared = tmp_path / "credentials"
    shared.write_text(f"[default]\naws_access_key_id = a\naws_secret_access_key = {SECRET}\n[other]\n")
    options = s3_options({"AWS_SHARED_CREDENTIALS_FILE": str(shared)})
    assert (options["access_key_id"], options["secret_access_key"]) == ("a", SECRET)
    assert "access_key_id" not in s3_options({"AWS_SHARED_CREDENTIALS_FILE": str(shared), "AWS_PROFILE": "other"})
    assert "access_key_id" not in s3_options({"AWS_SHARED_CREDENTIALS_FILE": str(shared), "AWS_ACCESS_KEY_ID": "b"})


def test_a_recipe_with_a_secret_in_its_mirror_is_refused_without_it() -> None:
    stages = [{"type": "operator", "steps": 10}]
    data = {"tasks": [{"name": "a", "path": "a.zarr"}]}
    document = {"version": 1, "run": {"name": "a"}, "data": data, "stages": stages}
    for wrong in (f"s3://u:{SECRET}@bucket/x", f"s3://bucket/x?signature={SECRET}", "https://example.org/x", "bucket"):
        with pytest.raises(ConfigError, match=r"checkpoint\.mirror") as caught:
            resolve_data({**document, "checkpoint": {"mirror": wrong}})
        assert SECRET not in caught.value.one_line()
    recipe = resolve_data({**document, "checkpoint": {"mirror": "s3://bucket/x"}}).recipe
    assert recipe.checkpoint.mirror == "s3://bucket/x"
    assert recipe_identity(recipe) == recipe_identity(resolve_data(document).recipe)


@pytest.mark.parametrize("key", ["../x", "/x", "a//b", "a/./b", "a\\..\\b", "a/..", "a\nb", ""])
def test_a_key_that_leaves_its_directory_is_not_plain(key: str) -> None:
    assert not is_plain_key(key)


def test_an_address_of_pip_with_a_name_is_no_secret() -> None:
    from ups.buckets.client import holds_secret

    assert not holds_secret("git+https://example.org/ups#egg=universal-simulator")
    assert holds_secret("git+https://example.org/ups#egg=universal-simulator&x#token=word")

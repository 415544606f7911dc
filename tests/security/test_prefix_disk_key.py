"""Files with KV are sealed with a key of their own, which every peer of a mesh derives from the secret."""

from __future__ import annotations

from exo_mesh.security.keys import announcement_key, prefix_disk_key


def test_the_key_depends_on_the_secret_and_on_the_purpose() -> None:
    secret = "a" * 32
    key = prefix_disk_key(secret)
    assert len(key) == 32 and key == prefix_disk_key(secret)
    assert key not in (prefix_disk_key("b" * 32), announcement_key(secret))

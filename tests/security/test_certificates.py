"""One secret, one authority; another secret, another one."""

from __future__ import annotations

import datetime
import hashlib
import hmac

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec

from exo_mesh.security import keys
from exo_mesh.security.certificates import SKEW_DAYS, VALID, authority, end_of, is_due, issue
from exo_mesh.security.credentials import MESH_DNS_NAME

SECRET = "RqbG1iSVDWVZ0yNAZt6zWv8Yv3k6bZr0M0u2tW1cGxE"
OTHER = "0f5c8bb0a1f3fd0c0a6b8a1d3f0e4a77"
NOW = datetime.datetime(2030, 5, 1, tzinfo=datetime.UTC)


def hkdf(secret: bytes, salt: bytes, info: bytes, num_bytes: int) -> bytes:
    """RFC 5869, written down a second time."""
    extracted = hmac.digest(salt, secret, hashlib.sha256)
    block, output, counter = b"", b"", 1
    while len(output) < num_bytes:
        block = hmac.digest(extracted, block + info + bytes([counter]), hashlib.sha256)
        output, counter = output + block, counter + 1
    return output[:num_bytes]


def test_hkdf_is_that_of_rfc_5869() -> None:
    """Test case 1 of the RFC's appendix."""
    salt, info = bytes(range(13)), bytes(range(0xF0, 0xFA))
    expected = "3cb25f25faacd57a90434f64d0362f2a2d2d0a90cf1a5a4c5db02d56ecc4c5bf34007208d5b887185865"
    assert hkdf(b"\x0b" * 22, salt, info, 42).hex() == expected
    assert keys.derive(SECRET, keys.CA_INFO, 48) == hkdf(SECRET.encode(), keys.SALT, keys.CA_INFO, 48)


def test_derived_keys_never_change() -> None:
    """A peer of a later version must still know a peer of this one."""
    assert keys.announcement_key(SECRET).hex() == "a8e3fe173d8ab8529707160c68cf4d6cd9e8fe51500d2e64240214bce9902bb1"
    numbers = keys.ca_key(SECRET).public_key().public_numbers()
    assert f"{numbers.x:064x}" == "54b8dc4038274ae011bf9070a5c4defa4a9d956968cc62f627528eb13ef14bf9"


def test_the_private_key_is_in_range_and_the_order_is_the_curves() -> None:
    generator = ec.derive_private_key(1, ec.SECP256R1()).public_key().public_numbers()
    last = ec.derive_private_key(keys.P256_ORDER - 1, ec.SECP256R1()).public_key().public_numbers()
    assert last.x == generator.x and last.y != generator.y  # (n - 1) G = -G


def test_the_purposes_have_different_keys() -> None:
    scalar = keys.ca_key(SECRET).private_numbers().private_value
    assert keys.announcement_key(SECRET) != scalar.to_bytes(32, "big")
    assert keys.announcement_key(SECRET) != keys.announcement_key(OTHER)


def test_two_peers_have_the_same_authority_and_another_secret_has_another() -> None:
    one, two, other = authority(SECRET), authority(SECRET), authority(OTHER)
    assert one.public_key() == two.public_key() and one.subject == two.subject
    assert one.serial_number == two.serial_number and one.not_valid_before_utc == two.not_valid_before_utc
    assert other.public_key() != one.public_key()
    one.verify_directly_issued_by(two)


def test_a_peers_certificate_is_its_own_and_signed_by_the_mesh() -> None:
    first, second = (issue(SECRET, "alpha", ["10.0.0.7", "[fd00::1]", "alpha.local"], NOW) for _ in range(2))
    assert first.private_key != second.private_key
    certificate = x509.load_pem_x509_certificate(first.certificate)
    certificate.verify_directly_issued_by(authority(SECRET))
    with pytest.raises(Exception, match=r".*"):
        certificate.verify_directly_issued_by(authority(OTHER))
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == [MESH_DNS_NAME, "alpha.local"]
    assert [str(ip) for ip in names.get_values_for_type(x509.IPAddress)] == ["10.0.0.7", "fd00::1"]
    assert certificate.not_valid_before_utc == NOW - datetime.timedelta(days=SKEW_DAYS)
    assert certificate.not_valid_after_utc == NOW + VALID


def test_a_peers_certificate_cannot_sign_others() -> None:
    certificate = x509.load_pem_x509_certificate(issue(SECRET, "alpha", [], NOW).certificate)
    assert not certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    assert not certificate.extensions.get_extension_for_class(x509.KeyUsage).value.key_cert_sign


def test_a_private_key_is_not_shown_by_accident() -> None:
    assert "PRIVATE" not in repr(issue(SECRET, "alpha", [], NOW))


def test_a_clock_that_starts_in_1970_makes_a_certificate() -> None:
    issue(SECRET, "alpha", [], datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC))


def test_a_certificate_is_renewed_when_a_third_of_its_time_is_left_or_the_clock_was_set() -> None:
    own = issue(SECRET, "alpha", [], NOW)
    assert end_of(own) == NOW + VALID
    assert not is_due(own, NOW) and not is_due(own, NOW + VALID / 2)
    assert is_due(own, NOW + VALID * 2 / 3) and is_due(own, NOW + 2 * VALID)
    assert is_due(own, NOW - datetime.timedelta(days=SKEW_DAYS + 1)), "it is not valid yet"
    from_1970 = issue(SECRET, "alpha", [], datetime.datetime(1970, 1, 2, tzinfo=datetime.UTC))
    assert is_due(from_1970, NOW), "the clock of a board has been set since"

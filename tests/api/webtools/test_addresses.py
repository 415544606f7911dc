"""Which addresses and URLs the web tools call."""

from __future__ import annotations

import ipaddress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exo_mesh.api.webtools.addresses import AddressRules, is_public, unwrapped
from exo_mesh.errors import InputError

PUBLIC = [
    "8.8.8.8",
    "1.1.1.1",
    "93.184.216.34",
    "2606:4700:4700::1111",
    "::ffff:8.8.8.8",
    "64:ff9b::808:808",
    "2002:808:808::1",
]
NOT_PUBLIC = [
    "127.0.0.1", "127.8.9.1", "0.0.0.0", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1",
    "100.100.100.200", "192.0.0.192", "192.88.99.1", "168.63.129.16", "198.18.0.1", "203.0.113.9", "224.0.0.1",
    "239.1.1.1", "240.0.0.1", "255.255.255.255", "::", "::1", "::ffff:127.0.0.1", "::ffff:169.254.169.254",
    "::ffff:10.0.0.1", "::127.0.0.1", "64:ff9b::7f00:1", "64:ff9b::a9fe:a9fe", "2002:7f00:1::1", "2002:a00:1::1",
    "2001::1", "2001:db8::1", "fe80::1", "fec0::1", "fd00:ec2::254", "fc00::1", "ff02::1", "3fff::1", "5f00::1",
]  # fmt: skip


@pytest.mark.parametrize("address", PUBLIC)
def test_a_public_address_may_be_called(address: str) -> None:
    assert is_public(unwrapped(ipaddress.ip_address(address)))
    AddressRules().check_addresses("a.example", 443, [address])


@pytest.mark.parametrize("address", NOT_PUBLIC)
def test_an_address_that_only_this_network_reaches_is_refused(address: str) -> None:
    with pytest.raises(InputError, match="not a public address"):
        AddressRules().check_addresses("a.example", 443, [address])


def test_a_name_with_a_public_and_a_private_address_is_refused() -> None:
    with pytest.raises(InputError):
        AddressRules().check_addresses("a.example", 443, ["8.8.8.8", "10.0.0.1"])


def test_an_address_with_a_zone_is_refused() -> None:
    with pytest.raises(InputError):
        AddressRules().check_addresses("a.example", 443, ["2606:4700::1%eth0"])


def test_a_public_address_of_a_peer_is_refused() -> None:
    rules = AddressRules(own=frozenset({"8.8.8.8"}))
    with pytest.raises(InputError):
        rules.check_addresses("a.example", 443, ["::ffff:8.8.8.8"])
    rules.check_addresses("a.example", 443, ["8.8.4.4"])


def test_an_allowed_pair_is_allowed_at_its_port_only() -> None:
    rules = AddressRules(allowed={("127.0.0.1", 8080)})
    rules.check_addresses("a.example", 8080, ["127.0.0.1"])
    with pytest.raises(InputError):
        rules.check_addresses("a.example", 80, ["127.0.0.1"])


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("", "1 to 2048"),
        ("a" * 2049, "1 to 2048"),
        ("http://a.example/\n", "printable"),
        ("file:///etc/passwd", "only http and https"),
        ("ftp://a.example/", "only http and https"),
        ("gopher://a.example/", "only http and https"),
        ("//a.example/", "only http and https"),
        ("a.example", "only http and https"),
        ("http:///x", "no host"),
        ("http://user:word@a.example/", "user name"),
        ("http://a.example:22/", "--web-tools-port"),
        ("http://a.example:52415/", "--web-tools-port"),
        ("http://a.example:99999/", "not a URL"),
        ("http://[::1", "not a URL"),
    ],
)
def test_a_url_that_the_tools_do_not_call_is_refused_with_the_reason(url: str, words: str) -> None:
    with pytest.raises(InputError, match=words) as caught:
        AddressRules().check_url(url)
    assert caught.value.param == "url"


def test_a_url_of_the_web_is_accepted_without_its_fragment() -> None:
    assert str(AddressRules().check_url("https://a.example/x?y=1#part")) == "https://a.example/x?y=1"
    assert AddressRules(ports=frozenset({8443})).check_url("https://a.example:8443/").port == 8443


@given(st.ip_addresses(v=4))
def test_an_address_inside_of_another_one_is_judged_like_the_address_alone(inner: ipaddress.IPv4Address) -> None:
    number = int(inner)
    mapped, nat64 = ipaddress.IPv6Address(0xFFFF << 32 | number), ipaddress.IPv6Address(0x64FF9B << 96 | number)
    six_to_four = ipaddress.IPv6Address(0x2002 << 112 | number << 80 | 1)
    assert {is_public(unwrapped(one)) for one in (mapped, nat64, six_to_four)} == {is_public(inner)}


@given(st.text(max_size=40), st.sampled_from(["", "http://", "https://", "http://a.example/", "http://["]))
def test_any_text_is_a_url_or_refused(text: str, before: str) -> None:
    try:
        url = AddressRules().check_url(before + text)
    except InputError:
        return
    assert url.scheme in ("http", "https") and url.raw_host and url.port in (80, 443) and not url.user

import contextlib
from random import Random

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_public_key,
)

from headway_operator.errors import KeyPairError
from headway_operator.keys import AdminKeys, KeyRing
from headway_operator.names import ServiceKey

KEY = ServiceKey("team", "demo")
NOW = 1_800_000_000.0


def test_a_token_names_its_service_and_lives_a_minute() -> None:
    keys = AdminKeys.generate()
    token = keys.mint(KEY, NOW)
    options = {"require": ["exp", "iat", "aud", "iss"], "verify_exp": False, "verify_iat": False}
    public_key = load_pem_public_key(keys.public_pem.encode())
    claims = jwt.decode(
        token,
        public_key,  # type: ignore[arg-type] # an Ed25519 key by construction
        algorithms=["EdDSA"],
        audience="team/demo",
        issuer="headway-operator",
        options=options,  # type: ignore[arg-type] # a plain dict of the known options
    )
    assert claims["iat"] == int(NOW)
    assert claims["exp"] == int(NOW) + 60


def test_a_stored_pair_signs_as_before_and_keeps_other_public_keys() -> None:
    keys, other = AdminKeys.generate(), AdminKeys.generate()
    loaded = AdminKeys.from_pem(keys.private_pem(), keys.public_pem + other.public_pem)
    assert loaded.public_pem.count("BEGIN PUBLIC KEY") == 2
    assert loaded.mint(KEY, NOW) == keys.mint(KEY, NOW)  # Ed25519 signatures are deterministic


def test_the_own_public_key_is_added_where_only_others_are_listed() -> None:
    keys, other = AdminKeys.generate(), AdminKeys.generate()
    loaded = AdminKeys.from_pem(keys.private_pem(), other.public_pem)
    assert keys.public_pem in loaded.public_pem
    assert other.public_pem in loaded.public_pem


def test_a_key_of_another_kind_is_refused_with_the_remedy() -> None:
    other = ec.generate_private_key(ec.SECP256R1())
    pem = other.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode()
    with pytest.raises(KeyPairError, match="want an Ed25519 key, got ECPrivateKey; delete it"):
        AdminKeys.from_pem(pem)
    with pytest.raises(KeyPairError, match=r"private.pem: not an unencrypted PEM private key"):
        AdminKeys.from_pem("nonsense")


def signer_of(token: str, *pairs: AdminKeys) -> int:
    """Which of the pairs has signed it."""
    for number, pair in enumerate(pairs):
        with contextlib.suppress(jwt.InvalidSignatureError):
            jwt.decode(
                token,
                load_pem_public_key(pair.public_pem.encode()),  # type: ignore[arg-type] # an Ed25519 key
                algorithms=["EdDSA"],
                options={"verify_exp": False, "verify_iat": False, "verify_aud": False},
            )
            return number
    raise AssertionError("signed by none of them")


def test_a_rotated_pair_is_told_before_it_signs_and_the_old_one_is_told_until_it_signs_no_more() -> None:
    old, new = AdminKeys.generate(), AdminKeys.generate()
    now = [1000.0]
    ring = KeyRing(old, lambda: now[0])
    assert ring.public_pem == old.public_pem
    assert not ring.adopt(AdminKeys.from_pem(old.private_pem()))
    assert ring.adopt(AdminKeys.from_pem(new.private_pem()))
    course = {}
    for seconds in (0, 179, 180, 359, 360):
        now[0] = 1000.0 + seconds
        told = tuple(pair.public_pem in ring.public_pem for pair in (old, new))
        course[seconds] = (signer_of(ring.mint(KEY, NOW), old, new), told)
    assert course == {
        0: (0, (True, True)),
        179: (0, (True, True)),
        180: (1, (True, True)),
        359: (1, (True, True)),
        360: (1, (False, True)),
    }


def test_every_token_of_any_course_of_rotations_is_verified_by_what_pods_knew_two_minutes_ago() -> None:
    """Whatever is adopted when: keys reach a pod within two minutes, and tokens within none."""
    random = Random(7)
    now = [0.0]
    for _ in range(15):
        now[0] = 0.0
        pairs = [AdminKeys.generate() for _ in range(5)]
        ring = KeyRing(pairs[0], lambda: now[0])
        told = []
        for second in range(0, 1200, 10):
            now[0] = float(second)
            if random.random() < 0.03:
                ring.adopt(random.choice(pairs))
            told.append(ring.public_pem)
            stale = told[max(0, len(told) - random.randint(1, 13))]
            assert pairs[signer_of(ring.mint(KEY, NOW), *pairs)].public_pem in stale

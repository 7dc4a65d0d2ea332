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
from headway_operator.keys import AdminKeys
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
